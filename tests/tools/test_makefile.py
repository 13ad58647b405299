"""The Makefile: the Python an environment is made with, progress messages, and `make serve`."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

MAKEFILE = Path(__file__).parents[2] / "Makefile"
REACHED = "made by the Python of PYTHON"


def stub(path: Path, version: str, *, without: str = "", noise: str = "") -> Path:
    """Write a Python that reports this version; it stops at `-m venv`, after it made the folder.

    It lacks the module `without`, and first writes `noise` to stderr.
    """
    said = f"import sys; sys.version_info = tuple(map(int, {version!r}.split('.'))) + (0,)"
    said += f"; sys.modules[{without!r}] = None; exec(sys.argv[1])"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        "#!/bin/sh\n"
        f'printf "{noise}" >&2\n'
        f'if [ "$1" = -m ]; then mkdir -p .venv/bin; echo "{REACHED}"; exit 1; fi\n'
        f'exec "{sys.executable}" -IS -c "{said}" "$2"\n'
    )
    path.chmod(0o755)
    return path


def test_the_first_installation_reports_what_takes_long(folder: Path) -> None:
    result = subprocess.run(
        ["make", "-n", "install"], cwd=folder, capture_output=True, text=True, timeout=60, check=True
    )
    assert "The first time this takes one to two minutes, half of it the compiler" in result.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shutil.copy(MAKEFILE, tmp_path)
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).touch()
    return tmp_path


def make(folder: Path, target: str) -> tuple[str, str]:
    """Return the output of a command that fails, as a stub makes no environment, and its stderr."""
    done = subprocess.run(
        ["make", target, f"PYTHON={folder / 'python'}"], cwd=folder, capture_output=True, text=True, timeout=60
    )
    assert done.returncode != 0
    return done.stdout, done.stderr


@pytest.mark.parametrize("target", [".venv/.installed", ".venv/.test"])
def test_too_old_a_python_is_reported_and_leaves_nothing(folder: Path, target: str) -> None:
    stub(folder / "python", "3.10")
    out, err = make(folder, target)
    assert "Cairn needs Python 3.11 or newer, this is 3.10: make serve PYTHON=python3.12" in err.splitlines()
    assert REACHED not in out and not (folder / ".venv").exists()


@pytest.mark.parametrize("target", [".venv/.installed", ".venv/.test"])
@pytest.mark.parametrize("old", ["3.10", "3.11", "3.12", "gone"])
def test_an_environment_of_another_python_is_replaced(folder: Path, target: str, old: str) -> None:
    stub(folder / "python", "3.12")
    if old == "gone":
        (folder / ".venv" / "bin").mkdir(parents=True)
        (folder / ".venv" / "bin" / "python").symlink_to(folder / "removed")
    else:
        stub(folder / ".venv" / "bin" / "python", old)
    kept = folder / ".venv" / "kept"
    kept.touch()
    out, _ = make(folder, target)
    assert REACHED in out.splitlines()
    assert kept.exists() == (old == "3.12")


@pytest.mark.parametrize("target", [".venv/.installed", ".venv/.test"])
def test_output_on_stderr_is_not_pythons_version(folder: Path, target: str) -> None:
    """PYTHONWARNINGS=bogus is enough for a line on stderr."""
    stub(folder / "python", "3.12")
    stub(folder / ".venv" / "bin" / "python", "3.12", noise="Invalid -W option ignored")
    kept = folder / ".venv" / "kept"
    kept.touch()
    out, _ = make(folder, target)
    assert REACHED in out.splitlines() and kept.exists()


@pytest.mark.parametrize("target", [".venv/.installed", ".venv/.test"])
@pytest.mark.parametrize("module", ["ensurepip", "venv"])
def test_an_environment_stays_where_another_cannot_be_made(folder: Path, target: str, module: str) -> None:
    """Debian's Python has these modules in a package of their own."""
    stub(folder / "python", "3.12", without=module)
    stub(folder / ".venv" / "bin" / "python", "3.11")
    kept = folder / ".venv" / "kept"
    kept.touch()
    out, err = make(folder, target)
    assert REACHED not in out and kept.exists()
    assert "This Python cannot make environments; Debian and Ubuntu have python3-venv for it." in err.splitlines()


def test_an_environment_whose_python_was_removed_is_not_up_to_date(folder: Path) -> None:
    stub(folder / "python", "3.12")
    installed = folder / ".venv" / ".installed"
    stub(folder / ".venv" / "bin" / "python", "3.12")
    installed.touch()
    fine = subprocess.run(["make", "-q", "install"], cwd=folder, capture_output=True, timeout=60)
    assert fine.returncode == 0
    (folder / ".venv" / "bin" / "python").unlink()
    out, _ = make(folder, "install")
    assert REACHED in out.splitlines()


CAIRN = """#!/bin/sh
echo "$@" >> said
case "$1" in
config) printf 'engine\\tauto\\tdefault\\nmodel\\t%s\\t%s\\n' "${CONFIGURED:-demo}" "${SOURCE:-default}" ;;
pull) echo /a/path; [ -z "$NO_REGISTRY" ] || { echo "cairn: the registry cannot be reached" >&2; exit 2; } ;;
esac
"""


@pytest.mark.parametrize(
    ("arguments", "env", "calls"),
    [
        ([], {}, ["config", "pull smollm2", "serve smollm2"]),
        ([], {"NO_REGISTRY": "1"}, ["config", "pull smollm2", "serve demo"]),
        (["MODEL=demo"], {}, ["serve demo"]),
        (["MODEL=org/m:Q4_K_M"], {}, ["serve org/m:Q4_K_M"]),
        ([], {"CONFIGURED": "/my/model", "SOURCE": "cairn.toml"}, ["config", "serve"]),
    ],
)
def test_make_serve_begins_with_a_real_model(
    folder: Path, arguments: list[str], env: dict[str, str], calls: list[str]
) -> None:
    """Without the registry, or if asked for, with the bundled one; a configured model comes before both."""
    stub(folder / ".venv" / "bin" / "python", "3.12")
    cairn = folder / ".venv" / "bin" / "cairn"
    cairn.write_text(CAIRN)
    cairn.chmod(0o755)
    (folder / ".venv" / ".installed").touch()
    outside = {name: value for name, value in os.environ.items() if name not in ("MODEL", "MAKEFLAGS", "MAKELEVEL")}
    done = subprocess.run(
        ["make", "serve", *arguments], cwd=folder, capture_output=True, text=True, timeout=60, env=outside | env
    )
    assert done.returncode == 0, done.stderr
    assert (folder / "said").read_text().splitlines() == calls and done.stdout == ""
    assert ("Serving the bundled model instead" in done.stderr) == ("NO_REGISTRY" in env)


OUTPUT = """Collecting numpy>=2.0 (from cairn-llm==0.1.0)
  Downloading numpy-2.3.1-cp311-cp311-manylinux_2_28_x86_64.whl (16.9 MB)
  Installing build dependencies: started
  *** Configuring CMake...
  -- Kernels are compiled for: portable;avx2
  [3/21] Building CXX object CMakeFiles/kernels_avx2.dir/variant.cpp.o
  nothing that says anything
  [4/21] Building CXX object CMakeFiles/_native.dir/module.cpp.o
WARNING: you should know
Installing collected packages: numpy, cairn-llm
"""
STEPS = [
    "finding packages: numpy",
    "downloading numpy",
    "getting the build tools",
    "looking at the compiler",
    "compiling the kernels, 25 % of the work",
    "compiling the kernels, 27 % of the work",
    "installing packages",
]


@pytest.mark.parametrize("code", [0, 3])
def test_an_installation_says_what_it_is_doing(code: int) -> None:
    tool = MAKEFILE.parent / "tools" / "say_progress.py"
    command = [sys.executable, "-c", f"import sys; sys.stdout.write({OUTPUT!r}); sys.exit({code})"]
    done = subprocess.run(
        [sys.executable, tool, "--every", "0", *command], capture_output=True, text=True, timeout=60, check=False
    )
    lines = [line.partition(" s: ")[2] for line in done.stdout.splitlines()]
    assert done.returncode == code
    assert [line for line, _ in itertools.groupby(lines) if line != "starting pip"] == STEPS
    assert done.stderr == (OUTPUT if code else "WARNING: you should know\n")


def test_bytecode_is_kept_although_the_environment_says_otherwise(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise each process of a server, and of the tests, would compile all that it imports."""
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    stub(folder / "python", "3.12", noise=r"none is kept: <$PYTHONDONTWRITEBYTECODE>\n")
    _, err = make(folder, ".venv/.installed")
    assert "none is kept: <>" in err.splitlines()


def test_an_installation_compiles_for_this_cpu_and_tests_for_all(folder: Path) -> None:
    for target, variants in (("install", "native"), (".venv/.test", "all")):
        result = subprocess.run(
            ["make", "-n", target], cwd=folder, capture_output=True, text=True, timeout=60, check=True
        )
        assert f"cmake.define.CAIRN_VARIANTS={variants}'" in result.stdout
    result = subprocess.run(["make", "-n", "wheel"], cwd=folder, capture_output=True, text=True, timeout=60, check=True)
    assert "CAIRN_VARIANTS=all" in result.stdout and "auditwheel repair" in result.stdout


WORKFLOWS = sorted((MAKEFILE.parent / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_files_are_whole(path: Path) -> None:
    """What a hosted runner would refuse: triggers, machines, time limits, steps, and actions without a version."""
    workflow = yaml.safe_load(path.read_text())
    assert set(workflow) <= {"name", True, "permissions", "jobs", "concurrency"} and workflow["permissions"]
    assert workflow[True], "its triggers; YAML reads the key `on` as true"
    for job in workflow["jobs"].values():
        assert job["runs-on"] and 0 < job["timeout-minutes"] <= 120
        for step in job["steps"]:
            assert len({"uses", "run"} & set(step)) == 1 and set(step) <= {"uses", "run", "with", "env", "name"}
            assert "uses" not in step or re.fullmatch(r"[\w.-]+/[\w.-]+@v\d+", step["uses"])


def test_releases_are_made_for_linux_and_macos_with_every_kernel() -> None:
    (path,) = (workflow for workflow in WORKFLOWS if workflow.name == "wheels.yml")
    machines = yaml.safe_load(path.read_text())["jobs"]["wheel"]["strategy"]["matrix"]["os"]
    assert [machine.partition("-")[0] for machine in machines] == ["ubuntu", "ubuntu", "macos"]
    assert any(machine.endswith("-arm") for machine in machines)
    settings = tomllib.loads((MAKEFILE.parent / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert settings["config-settings"] == {"cmake.define.CAIRN_VARIANTS": "all"}
    assert settings["linux"]["manylinux-x86_64-image"] == "manylinux_2_28"


def test_a_wheel_is_installed_where_there_is_no_compiler(prove: bool, tmp_path: Path) -> None:
    """`make wheel`, then a new environment whose PATH has no compiler. It takes minutes."""
    if not prove:
        pytest.skip("make prove")
    root = tmp_path / "source"
    subprocess.run(["git", "clone", "-q", MAKEFILE.parent, root], check=True)
    subprocess.run(["make", "wheel"], cwd=root, check=True, timeout=1800)
    (wheel,) = (root / "dist").glob("cairn_llm-*.whl")
    if sys.platform == "linux":
        assert "manylinux_2_" in wheel.name
    clean = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", clean], check=True)
    env = {"PATH": str(clean / "bin"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    subprocess.run([clean / "bin" / "pip", "install", "--quiet", wheel], env=env, check=True, timeout=600)
    asked = [clean / "bin" / "cairn", "generate", "demo", "What is Cairn?", "--kv-gb", "0.1"]
    said = subprocess.run(asked, env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL, check=True)
    assert said.stdout.strip()
    listed = "from cairn.kernels import native; print(*native.variants())"
    done = subprocess.run([clean / "bin" / "python", "-c", listed], env=env, capture_output=True, text=True, check=True)
    assert "portable" in done.stdout
