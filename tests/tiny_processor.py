"""The smallest image processor and vision model that transformers can make, for tests."""

import base64
import io
from pathlib import Path
from typing import Any

from areal.engine.builtin.tokenizer import make_tokenizer

POSITIONS = 2048
TOKENS_PER_IMAGE = 16
TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{- message.content }}
{%- else %}
{%- for part in message.content %}
{%- if part.type == 'image' %}{{- '<image>' }}{%- else %}{{- part.text }}{%- endif %}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""

PARTS_ONLY_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- for part in message.content if part.type == 'image' %}{{- '<image>' }}{%- endfor %}
{%- for part in message.content if part.type == 'text' %}{{- part.text }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
"""Images first, and text only as parts: like LLaVA's own template."""


def save_processor(directory: Path, template: str = TEMPLATE) -> None:
    """LLaVA's processor, for images of 32x32 pixels in patches of 8x8."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
    from transformers.models.llava.processing_llava import LlavaProcessor

    tokenizer = make_tokenizer(["What is in the picture? a red circle, a blue square"] * 4, 300, POSITIONS)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<image>"]})
    image_processor = CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
    processor: Any = LlavaProcessor(
        image_processor,
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=template,
    )
    processor.save_pretrained(directory)


def save_model(directory: Path) -> None:
    """The processor and its model, with random weights."""
    import torch
    from transformers import AutoTokenizer, CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    save_processor(directory)
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(hidden_size=32, intermediate_size=32, image_size=32, patch_size=8, **sizes)
    text = LlamaConfig(vocab_size=512, hidden_size=32, intermediate_size=32, max_position_embeddings=POSITIONS, **sizes)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    torch.manual_seed(0)
    image = tokenizer.convert_tokens_to_ids("<image>")
    config = LlavaConfig(vision_config=vision, text_config=text, image_token_index=image)
    LlavaForConditionalGeneration(config).save_pretrained(directory)


def png(colour: str = "red", size: tuple[int, int] = (40, 32)) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.new("RGB", size, colour).save(buffer, format="PNG")
    return buffer.getvalue()


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()
