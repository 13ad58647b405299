"""The kernels with AMX's tiles, on machines without them, and the choice between them and others.

Their instructions run in an emulator of our own, their arithmetic in a model: the variant `amxmodel`, which the tests
of all kernels run, too.

On a CPU with AMX the same program runs the instructions themselves.
"""

from __future__ import annotations

import errno
import logging
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from cairn.kernels import choose, native
from cairn.kernels.base import GROUP, Quantized
from cairn.kernels.choose import TileChoice, TileSpeed
from cairn.kernels.native import NativeKernels
from cairn.system.posix import SystemClock, SystemFile, SystemFiles, SystemRng
from cairn.types.errors import ConfigError, ModelError

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src/cairn/kernels/csrc"
COMPILER = os.environ.get("CXX", "g++")
FLAGS = "-std=c++20 -O3 -DNDEBUG -fPIC -mavx2 -mfma -mf16c -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni"
FLAGS += " -mprefer-vector-width=512 -ffp-contract=off -fno-math-errno -fno-trapping-math -fvisibility=hidden"
OTHER = "avx512vnni"
MODEL = "amxmodel"


def eight_bits(weights: Any) -> Quantized:
    """Weights in groups of 8 bits, about these."""
    scale = np.full((len(weights), weights.shape[1] // GROUP), 2.0**-5, np.float32)
    return Quantized(8, np.clip(weights * 32, -127, 127).astype(np.int8), scale)


needs_model = pytest.mark.skipif(not native.models().get(MODEL), reason="the model of the tiles was not compiled")


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The program `tiles`, with the object of the kernels beside it."""
    if platform.machine() not in ("x86_64", "AMD64") or platform.system() != "Linux" or not shutil.which(COMPILER):
        pytest.skip("a compiler for x86-64 Linux is needed")
    if " avx512_vnni " not in Path("/proc/cpuinfo").read_text().replace("\n", " "):
        pytest.skip("the kernels beside the tiles need AVX-512")
    folder = tmp_path_factory.mktemp("tiles")
    knows = subprocess.run(
        [COMPILER, "-x", "c++", "-c", "-", "-o", folder / "knows.o"],
        input='int main() { asm("tdpbf16ps %tmm2, %tmm1, %tmm0"); }',
        text=True,
        capture_output=True,
    )
    if knows.returncode:
        pytest.skip("this assembler does not know AMX")
    source = SOURCES / "amx_variant.cpp"
    jobs = [
        [*FLAGS.split(), "-DCAIRN_VARIANT=amx", "-c", source, "-o", folder / "amx.o"],
        [*FLAGS.split(), f"-DCAIRN_VARIANT={MODEL}", "-DCAIRN_TILE_MODEL", "-c", source, "-o", folder / "model.o"],
        ["-std=c++20", "-O1", "-ffp-contract=off", f"-I{SOURCES}", "-o", folder / "tiles", "-pthread"],
    ]
    jobs[2] += [ROOT / "tests/kernels/tiles.cpp", folder / "amx.o", folder / "model.o"]
    for job in jobs:
        subprocess.run([COMPILER, *job], check=True)
    return folder / "tiles"


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True)


def test_the_instructions_compute_the_bits_of_the_model(program: Path) -> None:
    """Registers, addresses, strides and configurations are the compiled ones; rows, sizes and threads are odd."""
    done = run(program)
    if done.returncode == 77:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the unit is exact; 240 cases, 0 with other bits" in done.stdout


def test_a_unit_that_adds_in_another_order_is_found(program: Path) -> None:
    if native.has_tiles():
        pytest.skip("here the unit is the CPU's own")
    done = run(program, "wrong-order")
    assert done.returncode == 1 and "the unit is inexact" in done.stdout


def instructions(program: Path) -> list[tuple[str, bytes, str]]:
    """The compiled kernels: a function's name, an instruction's bytes, and its text."""
    if not shutil.which("objdump"):
        pytest.skip("objdump not found: Debian has binutils")
    text = run("objdump", "-dC", "--insn-width=16", program.with_name("amx.o"))
    assert text.returncode == 0, text.stderr
    name, found = "", []
    for line in text.stdout.splitlines():
        if head := re.fullmatch(r"[0-9a-f]+ <(.*)>:", line):
            name = head[1]
        elif body := re.match(r"\s+[0-9a-f]+:\t([0-9a-f ]+?)\s*\t(.*)", line):
            found.append((name, bytes.fromhex(body[1]), body[2].split("#")[0].strip()))
    return found


def coded(code: int, prefix: int, register: int, other: int, third: int = 0) -> bytes:
    """An instruction of registers alone, as the manual encodes it (VEX.128, map 0F38, W0)."""
    return bytes([0xC4, 0xE2, (~third & 15) << 3 | prefix, code, 0xC0 | register << 3 | other])


def test_the_compiled_loop_is_four_loads_and_four_products(program: Path) -> None:
    """No spill, no vector and no call stands between the instructions that a block of 32 by 32 takes.

    With weights in a cache; those that come from memory are asked for ahead, a line at a time.
    """
    found = instructions(program)
    inner = [(raw, text) for name, raw, text in found if "tile_block<cairn::amx::TileUnit, 2, 2, false>" in name]
    texts = [re.sub(r"\s+", " ", text) for _, text in inner]
    first = next(n for n, text in enumerate(texts) if text.startswith("tileloadd"))
    # Up to the jump back.
    loop = texts[first : first + next(n for n, text in enumerate(texts[first:]) if text.startswith("j")) + 1]
    tiles = [re.sub(r"\(.*\)", "(...)", text) for text in loop if "tmm" in text]
    assert sorted(text for text in tiles if text.startswith("tileloadd")) == [
        f"tileloadd (...),%tmm{tile}" for tile in (4, 5, 6, 7)
    ]
    products = [text for text in tiles if text.startswith("tdpbf16ps")]
    assert set(products) == {
        "tdpbf16ps %tmm6,%tmm4,%tmm0",
        "tdpbf16ps %tmm7,%tmm4,%tmm1",
        "tdpbf16ps %tmm6,%tmm5,%tmm2",
        "tdpbf16ps %tmm7,%tmm5,%tmm3",
    }
    assert len(tiles) == 8 and len(products) == 4
    rest = [text for text in loop if "tmm" not in text]
    assert {text.split()[0] for text in rest} <= {"lea", "add", "sub", "mov", "cmp", "inc", "dec", "jg", "jne", "jl"}
    others = [text for text in rest if not text.startswith(("lea", "j"))]
    assert not [text for text in others if "(" in text], "nothing else touches memory"


def test_the_compiled_bytes_are_those_of_the_manual(program: Path) -> None:
    found = instructions(program)
    products = {(raw, text) for _, raw, text in found if text.startswith("tdpbf16ps")}
    assert len(products) >= 4
    for raw, text in products:
        weights, x, sums = (int(number) for number in re.findall(r"%tmm(\d)", text))
        assert raw == coded(0x5C, 2, sums, x, weights), text
    for raw, text in {(raw, text) for _, raw, text in found if text.startswith("tilezero")}:
        assert raw == coded(0x49, 3, int(text[-1]), 0), text
    assert {raw for _, raw, text in found if text == "tilerelease"} == {coded(0x49, 0, 0, 0)}
    configured = [name for name, _, text in found if text.startswith("ldtilecfg")]
    places = ("tile_product<cairn::amx::TileUnit>", "multiply_pairs", "unit_runs")
    assert configured and all(any(place in name for place in places) for name in configured)


def test_the_installed_module_has_them(program: Path) -> None:
    if "amx" not in native.variants():
        pytest.skip("amx was not compiled here")
    module = native._module().__file__
    dump = run("objdump", "-d", "--no-show-raw-insn", module).stdout
    for one in ("ldtilecfg", "tileloadd", "tilestored", "tilerelease", "tdpbf16ps %tmm7,%tmm5,%tmm3"):
        assert one in dump, one


def test_an_installation_compiles_them_where_the_cpu_has_tiles(program: Path) -> None:
    """Elsewhere `native` costs no second more than it did."""
    asked = program.with_name("this_cpu")
    subprocess.run([COMPILER, SOURCES / "this_cpu.cpp", "-o", asked], check=True)
    assert ("amx" in run(asked).stdout.split(";")) == native.has_tiles()


@needs_model
@pytest.mark.parametrize("dtype", [np.float32, np.float16, "int8"])
def test_all_but_bfloat16_has_the_bits_of_the_kernels_beside_it(dtype: Any) -> None:
    """Weights in float16 are not rounded to bfloat16, which has three bits less."""
    random = np.random.default_rng(1)
    weights = random.standard_normal((40, 96), dtype=np.float32)
    part = eight_bits(weights) if dtype == "int8" else weights.astype(dtype)
    x, found = random.standard_normal((19, 96), dtype=np.float32), []
    for name in (MODEL, OTHER):
        kernels = NativeKernels(name)
        out = np.zeros((19, 40), np.float32)
        kernels.project(x, kernels.matrix([part], [None]), out)
        kernels.close()
        found.append(out.tobytes())
    assert found[0] == found[1]


@needs_model
def test_products_with_parts_of_several_types_are_each_their_own() -> None:
    """One matrix of bfloat16, float16 and 8 bits: activations are rounded in both ways beside each other."""
    random = np.random.default_rng(2)
    weights = [random.standard_normal((out, 64), dtype=np.float32) for out in (20, 33, 16)]
    parts = [weights[0].astype(ml_dtypes.bfloat16), weights[1].astype(np.float16), eight_bits(weights[2])]
    x = random.standard_normal((37, 64), dtype=np.float32)
    kernels = NativeKernels(MODEL, threads=2)
    whole = np.zeros((37, 69), np.float32)
    kernels.project(x, kernels.matrix(parts, [None] * 3), whole)
    at = 0
    for part, size in zip(parts, (20, 33, 16), strict=True):
        alone = np.zeros((37, size), np.float32)
        kernels.project(x, kernels.matrix([part], [None]), alone)
        assert alone.tobytes() == np.ascontiguousarray(whole[:, at : at + size]).tobytes()
        at += size
    kernels.close()


@needs_model
def test_the_name_is_part_of_what_stored_kv_is_found_by() -> None:
    names = {NativeKernels(name).numerics for name in (MODEL, OTHER)}
    assert len(names) == 2


@needs_model
def test_a_measurement_times_both() -> None:
    found = choose.measure(OTHER, SystemClock().now, "a CPU", tiles=MODEL)
    assert min(found.prompt, found.other_prompt, found.token, found.other_token) > 0
    assert found.cpu == "a CPU" and found.other == OTHER


FAST = choose.decided("a CPU", OTHER, 1.0, 4.0, 1.0, 1.0)
SLOW = choose.decided("a CPU", OTHER, 1.0, 1.1, 1.0, 1.0)
SLOW_TOKENS = choose.decided("a CPU", OTHER, 1.0, 4.0, 2.0, 1.0)


@pytest.fixture
def tiles(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[TileSpeed]]:
    """A CPU with AMX; each start that measures finds the next of a list."""
    found: list[TileSpeed] = []
    monkeypatch.setattr(native, "variants", lambda: {"amx": True, OTHER: True, "portable": True})
    monkeypatch.setattr(native, "has_tiles", lambda: True)
    monkeypatch.setattr(native, "tile_trouble", lambda: "")
    monkeypatch.setattr(native, "cpu", lambda: "a CPU")
    monkeypatch.setattr(choose, "measure", lambda *_: found.pop(0))
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    forget()
    yield found
    forget()


def forget() -> None:
    """As a new process begins."""
    choose.tile_speed.cache_clear()
    choose._tell_of_amx.cache_clear()


def decision(folder: Path) -> bool:
    found = TileChoice(OTHER, SystemFiles(), SystemClock(), SystemRng(), folder).found()
    assert found is not None
    return found.chosen


@pytest.mark.parametrize(("measured", "name"), [(FAST, "amx"), (SLOW, OTHER), (SLOW_TOKENS, OTHER)])
def test_auto_is_what_was_measured_first_on_this_machine(
    tiles: list[TileSpeed],
    measured: TileSpeed,
    name: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every later start computes the same bits, whatever it would measure, and says once why."""
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(native, "NativeKernels", lambda name, threads: name)
    tiles += [measured]
    for start in range(3):
        assert choose.chosen("auto") == name and len(caplog.messages) == start
        for _ in range(2):
            assert choose.load_kernels("auto", 1) == name
        forget()
    assert len(set(caplog.messages)) == 1
    said = "means amx: it" if name == "amx" else f"stays with {OTHER}: with amx it"
    assert caplog.messages[0].startswith(f"kernels auto {said} measured bf16 prompts"), caplog.messages[0]
    assert ("Contexts that other kernels stored are not found" in caplog.messages[0]) == (name == "amx")


def test_a_process_that_was_first_decides_for_all(tiles: list[TileSpeed], tmp_path: Path) -> None:
    """Two that start at once both measure; what is kept is one."""

    def measured_meanwhile(*_: Any) -> TileSpeed:
        written(tmp_path, tiles)
        return SLOW

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "measure", measured_meanwhile)
        assert decision(tmp_path), "as the other one measured"
    assert len(list(tmp_path.iterdir())) == 1, "nothing else is left"


def written(folder: Path, tiles: list[TileSpeed]) -> list[Path]:
    tiles.append(FAST)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(choose, "measure", lambda *_: tiles.pop(0))
        assert decision(folder)
    return list(folder.iterdir())


def test_a_damaged_file_is_measured_anew(tiles: list[TileSpeed], tmp_path: Path) -> None:
    folder = tmp_path / "kept"
    (path,) = written(folder, tiles)
    path.write_bytes(path.read_bytes().replace(b'"prompt": 1.0', b'"prompt": 0.0'))
    tiles.append(SLOW)
    assert not decision(folder)
    assert not decision(folder), "and kept"
    assert list(folder.iterdir()) == [path]


def test_a_full_disk_gets_no_file_at_each_start(
    tiles: list[TileSpeed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "no space left")

    monkeypatch.setattr(SystemFile, "append", full)
    tiles.append(FAST)
    assert TileChoice(OTHER, SystemFiles(), SystemClock(), SystemRng(), tmp_path).found() is None
    assert not list(tmp_path.iterdir())


def test_another_cpu_has_a_choice_of_its_own(
    tiles: list[TileSpeed], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiles += [FAST, SLOW]
    assert decision(tmp_path)
    monkeypatch.setattr(native, "cpu", lambda: "another CPU")
    assert not decision(tmp_path)
    monkeypatch.setattr(native, "cpu", lambda: "a CPU")
    assert decision(tmp_path)


def test_what_cannot_be_kept_is_not_used(
    tiles: list[TileSpeed], tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each start would choose for itself, and one that is disturbed would lose what is stored."""
    (tmp_path / "cairn").write_text("a file where the folder should be")
    tiles.append(FAST)
    assert choose.chosen("auto") == OTHER
    assert "kernels auto stays with avx512vnni" in caplog.text
    forget()

    def homeless() -> Path:
        raise ConfigError("this user has no home folder")

    monkeypatch.setattr(choose, "choices_folder", homeless)
    assert choose.chosen("auto") == OTHER
    assert "this user has no home folder; without it no choice" in caplog.text


def test_a_cpu_whose_tiles_cannot_be_used_says_so_once(
    tiles: list[TileSpeed], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    why = "the AMX tiles of this CPU compute other bits than Intel's manual says"
    monkeypatch.setattr(native, "variants", lambda: {"amx": False, "portable": True})
    monkeypatch.setattr(native, "tile_trouble", lambda: why)
    for _ in range(2):
        kernels = choose.load_kernels("auto", 1)
        assert kernels.numerics[1] == "portable"
        kernels.close()
    assert caplog.messages == [f"this CPU has AMX, but the kernels amx do not run: {why}; portable run"]
    assert choose.described("auto") == f"native kernels (portable; without AMX: {why})"
    with pytest.raises(ModelError, match=f"kernels is amx, but {why}; use one of portable, reference"):
        choose.chosen("amx")


def test_the_kernels_that_were_asked_for_are_not_measured(tiles: list[TileSpeed]) -> None:
    assert choose.chosen("amx") == "amx" and choose.chosen(OTHER) == OTHER
    assert not tiles


def test_a_machine_without_amx_says_why_not() -> None:
    if native.has_tiles() or not native.variants():
        pytest.skip("this CPU has AMX, or nothing was compiled")
    assert "amx" not in native.variants() or not native.variants()["amx"]
    with pytest.raises(ModelError, match="kernels is amx, but this CPU has no AMX tiles of bfloat16"):
        choose.chosen("amx")
    assert choose.tile_speed(OTHER) is None and not choose.amx_unused()


def test_wheels_and_images_have_no_model() -> None:
    for name in ("pyproject.toml", "deploy/Containerfile", ".github/workflows/wheels.yml"):
        assert "TILE_MODEL" not in (ROOT / name).read_text()
    assert "TILE_MODEL" not in (ROOT / "Makefile").read_text().split("\nwheel:")[1].split("\n\n")[0]
    assert "option(CAIRN_TILE_MODEL" in (SOURCES / "CMakeLists.txt").read_text()
