"""`proxy.drop_params`: what cannot be honoured is dropped, and said so."""

import logging

import pytest

from areal.proxy.dialects.base import ParameterRules

BODIES = {
    "chat/completions": {"messages": [{"role": "user", "content": "hi"}], "logit_bias": {"5": 1}, "unheard_of": 1},
    "responses": {"input": "hi", "background": True, "tools": [{"type": "web_search"}]},
    "messages": {
        "messages": [{"role": "user", "content": "hi"}],
        "max_tokens": 9,
        "thinking": {"type": "enabled", "budget_tokens": 5},
        "output_config": {"effort": "low"},
    },
}
DROPPED = {
    "chat/completions": {"logit_bias", "unheard_of"},
    "responses": {"background", "tools"},
    "messages": {"thinking", "output_config"},
}


@pytest.mark.parametrize("path", BODIES)
async def test_what_cannot_be_honoured_is_dropped_and_named_once(start_proxy, path, caplog):
    proxy = await start_proxy(drop_params=True)
    session = proxy.open_session()
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            response = await proxy.http_client.post(f"{session.base_url}/{path}", json=BODIES[path])
            assert response.status_code == 200
    named = [record.getMessage() for record in caplog.records if "drop_params" in record.getMessage()]
    assert {line.split()[0] for line in named} == DROPPED[path]
    assert len(named) == len(DROPPED[path])


async def test_wrong_values_are_refused_all_the_same(start_proxy):
    proxy = await start_proxy(drop_params=True)
    body = {"messages": [{"role": "user", "content": "hi"}], "temperature": "hot"}
    response = await proxy.http_client.post(f"{proxy.open_session().base_url}/chat/completions", json=body)
    assert response.status_code == 400


def test_name_that_cannot_be_printed_is_logged_with_a_mark(caplog: pytest.LogCaptureFixture) -> None:
    ParameterRules(drop_params=True).refuse_or_drop("m\ud800od\x1bel", 1, "is not supported")
    assert caplog.messages == ["m�od�el is not supported; it is dropped because of proxy.drop_params"]
