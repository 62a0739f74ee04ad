"""A wheel made on x86 Linux with a C++ compiler has the engine's kernel compiled; other installs compile it when it is
first used. A wheel also carries the examples, for `areal new --example`. Where the project lives is known to whoever
builds a release, not to its files. Everything else is in pyproject.toml."""

import os
import platform
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

from setuptools import Distribution, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("areal/engine/native")
EXAMPLES = Path("areal/cli/new/example_files")
COMPILE = runpy.run_path(str(Path(__file__).parent / NATIVE / "compile.py"))


def compiles() -> bool:
    fits = sys.platform == "linux" and platform.machine() == "x86_64"
    return fits and COMPILE["find_compiler"]() is not None


class BuildWithMore(build_py):
    def run(self) -> None:
        super().run()
        if self.editable_mode:  # then both are found in the checkout
            return
        carried = Path(self.build_lib) / EXAMPLES
        shutil.rmtree(carried, ignore_errors=True)  # what an earlier build left may have been renamed since
        shutil.copytree("examples", carried, ignore=shutil.ignore_patterns("runs", "__pycache__"))
        if compiles():
            COMPILE["build_prebuilt"](Path(self.build_lib) / NATIVE / "prebuilt")


class PlatformWheel(bdist_wheel):
    def get_tag(self) -> tuple[str, str, str]:
        """The libraries belong to a platform, and to no version of Python."""
        _, _, place = super().get_tag()
        return ("py3", "none", place)


class WithKernel(Distribution):
    def has_ext_modules(self) -> bool:
        return compiles()


def addresses() -> dict[str, str]:
    """For the metadata; a build that is given none names none."""
    home = os.environ.get("AREAL_PROJECT_URL", "").rstrip("/")
    if not home:
        return {}
    return {
        "Source": home,
        "Issues": f"{home}/issues",
        "Documentation": f"{home}/blob/main/docs/index.md",
        "Changelog": f"{home}/blob/main/CHANGELOG.md",
    }


classes: dict[str, Any] = {"build_py": BuildWithMore, "bdist_wheel": PlatformWheel}
setup(distclass=WithKernel, cmdclass=classes, project_urls=addresses())
