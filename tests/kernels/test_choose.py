"""The choice of kernels: the fastest, the requested ones, or an error that says why not."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest

from cairn.kernels import choose, native
from cairn.types.errors import ModelError
from tests.tiny_models import KERNELS, load, write_model


def found(monkeypatch: pytest.MonkeyPatch, **variants: bool) -> None:
    monkeypatch.setattr(native, "variants", lambda: variants)


def test_auto_is_the_fastest_that_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch, avx512=True, avx2=True, portable=True)
    assert choose.chosen("auto") == "avx512"
    found(monkeypatch, avx512=False, avx2=True, portable=True)
    assert choose.chosen("auto") == "avx2"
    assert choose.chosen("portable") == "portable" and choose.chosen("reference") == "reference"
    assert choose.described("auto") == "native kernels (avx2)"


def test_variants_stand_in_order_of_speed_on_this_cpu() -> None:
    """On some Intel CPUs multiplying bfloat16 pairs is slower than widening them, so there `avx512` comes second."""
    variants = list(native.variants())
    info = Path("/proc/cpuinfo")
    intel = info.exists() and "GenuineIntel" in info.read_text()
    order = ["avx512vnni", "avx512"] if intel else ["avx512", "avx512vnni"]
    assert variants == [
        name for name in ["amx", *order, "avxvnni", "avx2", "neoni8mm", "neon", "portable"] if name in variants
    ]


def test_native_kernels_are_compiled_if_there_is_a_compiler() -> None:
    """An installation works without them, so nothing else would show that the sources do not compile."""
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None or subprocess.run([compiler, "--version"], capture_output=True).returncode:
        pytest.skip(f"{compiler} compiles nothing here")
    assert native.variants()


def test_without_a_compiler_the_reference_kernels_run_and_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    found(monkeypatch)
    assert choose.chosen("auto") == "reference"
    assert "not compiled; install again with a C++ compiler" in choose.described("auto")
    assert "as configured" in choose.described("reference")


@pytest.mark.parametrize("error", [ImportError("libstdc++.so.6: version GLIBCXX_9 not found"), None])
def test_kernels_that_cannot_be_loaded_say_why(monkeypatch: pytest.MonkeyPatch, error: ImportError | None) -> None:
    def absent(name: str) -> None:
        raise error or ModuleNotFoundError(f"No module named {name!r}", name=name)

    monkeypatch.setattr(native.importlib, "import_module", absent)
    assert choose.chosen("auto") == "reference"
    with pytest.raises(ModelError) as caught:
        choose.chosen("avx2")
    for said in (choose.described("auto"), str(caught.value)):
        assert "libstdc++.so.6: version GLIBCXX_9 not found" in said if error else "not compiled" in said


def test_kernels_that_cannot_run_are_an_error_with_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Known failure 50: an option is honoured or refused, never ignored."""
    found(monkeypatch, avx512=False, portable=True)
    with pytest.raises(ModelError, match=r"kernels is avx512, but this CPU lacks .*; use one of portable, reference"):
        choose.chosen("avx512")
    with pytest.raises(ModelError, match="kernels is avx2, but they were not compiled"):
        load(write_model(tmp_path), kernels="avx2")


@pytest.mark.parametrize("kind", KERNELS)
def test_the_engine_runs_the_requested_kernels(kind: str, tmp_path: Path) -> None:
    engine = load(write_model(tmp_path), kernels=kind)
    assert (engine._kernels.numerics[1] == kind) == (kind != "reference")
    assert type(engine._kernels).__name__ == ("ReferenceKernels" if kind == "reference" else "NativeKernels")
    engine.close()


def test_kernels_of_other_sources_are_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a pull without a build.

    Or a failed one) their results would be stored under the identity of these sources.
    """
    other = SimpleNamespace(VERSION="native-0", variants=lambda: [("portable", True)])
    monkeypatch.setattr(native.importlib, "import_module", lambda name: other)
    with pytest.raises(ModelError, match="the compiled kernels are of another version"):
        choose.chosen("auto")
