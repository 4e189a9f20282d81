# SPDX-License-Identifier: Apache-2.0
"""Every check that CI runs, the demo and the build. ``nox -l`` lists them.

``nox -s tests`` runs all tests, ``nox -s "tests(fsdp)" -- -k planner`` some of one package.
"""

import ctypes
import hashlib
import re
import sys
from pathlib import Path
from typing import Any

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "tests"]

ROOT = Path(__file__).parent
PACKAGES = ("dtensor", "fsdp", "legacy")  # each may import only those before it
SUITES = (*PACKAGES, "root")
TORCH = ("2.11", "2.12", "2.13", "2.14", "2.15")  # what the packages' metadata allows
DEMO = (
    "--nproc 2 --optimizer muon --compare "
    "--output-dir runs/demo --checkpoint-dir runs/demo/checkpoint"
)


@nox.session
def lint(session: nox.Session) -> None:
    """Check format and lint, with the one configuration at the root."""
    install(session, "lint")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def types(session: nox.Session) -> None:
    """Check the annotations of the packages, and of code that uses them, against torch's own."""
    bin_dir = torch_env(session)
    install(session, "types")
    session.run("mypy", "--python-executable", str(bin_dir / "python"), *session.posargs)


@nox.session
def layers(session: nox.Session) -> None:
    """Check the arrows between layers; needs no torch."""
    install(session, "layers")
    session.run("pytest", "--noconftest", "tests/test_layers.py", *session.posargs)


@nox.session(venv_backend="none")
@nox.parametrize("suite", SUITES, ids=SUITES)
def tests(session: nox.Session, suite: str) -> None:
    """Run every package's tests, those that need all packages (root), and then lint."""
    if suite == "root":
        session.notify("lint")
    run_suite(session, suite, device="cpu")


@nox.session(venv_backend="none")
@nox.parametrize("suite", SUITES, ids=SUITES)
def tests_gpu(session: nox.Session, suite: str) -> None:
    """Run the same tests and the GPU-only ones on NCCL, with up to one rank per GPU."""
    if not cuda_devices():
        print("tests_gpu needs an NVIDIA GPU and its driver, and found none.", file=sys.stderr)
        sys.exit(2)  # neither a pass nor a failed test
    run_suite(session, suite, device="cuda")


@nox.session
@nox.parametrize("torch", TORCH, ids=TORCH)
def tests_torch(session: nox.Session, torch: str) -> None:
    """Run the packages' tests on one PyTorch, each in an environment of its own, of some GB."""
    projects = [arg for name in PACKAGES for arg in ("-e", f"packages/vescale-{name}")]
    session.install(f"torch=={torch}.*", *requirements("tests"), *projects)
    for name in PACKAGES:
        folder = f"packages/vescale-{name}/tests"
        session.run("pytest", folder, *session.posargs, env={"OMP_NUM_THREADS": "1"})


@nox.session(venv_backend="none")
def demo(session: nox.Session) -> None:
    """Train a small language model on 2 ranks, or ``-- --nproc 8``; passes all options on."""
    bin_dir = torch_env(session)
    command = ("python", "examples/train_lm.py", *DEMO.split(), *session.posargs)
    try:
        # Ctrl-C reaches the ranks too: leave them the time to end their step and save.
        run(session, bin_dir, *command, interrupt_timeout=60, terminate_timeout=10)
    except nox.command.CommandFailed as failure:
        if getattr(failure, "return_code", None) == 2:
            sys.exit(2)  # what was asked for makes no sense, and the script said why
        raise


@nox.session(venv_backend="none")
def reshard_matrix(session: nox.Session) -> None:
    """Load checkpoints of every layout in every other; the tests take a covering set of them."""
    path = "packages/vescale-fsdp/tests/checkpoint/test_reshard_matrix.py"
    environ = {"VESCALE_RESHARD": "all", "OMP_NUM_THREADS": "1"}
    run(session, torch_env(session), "pytest", "-s", path, *session.posargs, env=environ)


@nox.session(venv_backend="none")
def faults(session: nox.Session) -> None:
    """Kill ranks at random moments of 50 runs, and see that no complete checkpoint is lost."""
    path = "packages/vescale-fsdp/tests/checkpoint/test_faults.py"
    environ = {"VESCALE_FAULTS": "50", "OMP_NUM_THREADS": "1"}
    run(session, torch_env(session), "pytest", "-s", path, *session.posargs, env=environ)


@nox.session
def build(session: nox.Session) -> None:
    """Build all sdists and wheels into dist/; ``-- vescale-fsdp-v0.1.0``: what this tag names."""
    install(session, "build")
    for tag in session.posargs:
        session.run("python", "-m", "tools.release_source", tag)
    for name in [tag.split("-")[1] for tag in session.posargs] or PACKAGES:
        session.run("python", "-m", "build", "--outdir", "dist", f"packages/vescale-{name}")


@nox.session
def release_check(session: nox.Session) -> None:
    """Verify that packages can be released: ``-- fsdp``, or a tag; ``-- --help`` has the rest."""
    install(session, "release")
    session.run("python", "-m", "tools.release_check", *session.posargs)


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation as a site into site/html; warnings are errors."""
    install(session, "docs")
    session.run("python", "-m", "tools.site", silent=True)
    session.run("zensical", "build", "--strict", "--clean")
    print("Read it: python -m http.server --directory site/html")


@nox.session
def audit(session: nox.Session) -> None:
    """Ask the package index for known weaknesses of what the tests install; needs a network."""
    freeze = ("-m", "pip", "freeze", "--exclude-editable")
    listed = run(session, torch_env(session), "python", *freeze, silent=True)
    install(session, "audit")
    pins = Path(session.create_tmp(), "installed.txt")
    pins.write_text(re.sub(r"\+\w+$", "", listed, flags=re.MULTILINE))  # no index has 2.13.0+cpu
    # strict: what the index was not asked about, or did not know, is no pass
    options = ("--strict", "--no-deps", "--disable-pip", "--requirement", str(pins))
    session.run("pip-audit", *options, *session.posargs)


def run_suite(session: nox.Session, suite: str, *, device: str) -> None:
    """Run one suite; every suite has a pytest run, so also a fork server, of its own."""
    bin_dir = torch_env(session)
    folder = "tests" if suite == "root" else f"packages/vescale-{suite}/tests"
    environ = {"VESCALE_TEST_DEVICE": device, "OMP_NUM_THREADS": "1"}
    run(session, bin_dir, "pytest", folder, *session.posargs, env=environ)


def run(session: nox.Session, bin_dir: Path, program: str, *args: str, **options: Any) -> Any:
    return session.run(str(bin_dir / program), *args, external=True, **options)


def install(session: nox.Session, group: str) -> None:
    """Install a dependency group of the root pyproject.toml, in the versions that CI tests."""
    session.install("-c", "constraints.txt", *requirements(group))


def requirements(group: str) -> tuple[str, ...]:
    return nox.project.dependency_groups(nox.project.load_toml("pyproject.toml"), group)


def torch_env(session: nox.Session) -> Path:
    """Return the bin folder of the one environment with torch and this checkout's packages.

    It is shared, since torch takes most of a gigabyte and its download most of a first run,
    and left as it is until something that it is made from changes. ``rm -r .nox`` rebuilds it.
    """
    if not (3, 11) <= sys.version_info[:2] < (3, 14):
        session.error(
            f"veScale needs Python 3.11 to 3.13, but nox runs on {sys.version.split()[0]}; "
            "start it with another one, as in: python3.11 -m nox -s tests"
        )
    projects = [f"packages/vescale-{name}" for name in PACKAGES]
    recipe = [Path("constraints.txt"), *(Path(path, "pyproject.toml") for path in projects)]
    text = "\n".join([str(ROOT), *requirements("tests"), *(path.read_text() for path in recipe)])
    wanted = hashlib.sha256(text.encode()).hexdigest()

    env = ROOT / ".nox" / f"torch-{sys.version_info[0]}.{sys.version_info[1]}"
    bin_dir, stamp = env / "bin", env / "recipe.sha256"
    if not (bin_dir / "python").exists():
        session.run(sys.executable, "-m", "virtualenv", "--quiet", str(env), external=True)
    if not stamp.exists() or stamp.read_text() != wanted:
        stamp.unlink(missing_ok=True)
        editable = [arg for path in projects for arg in ("-e", path)]
        pip = ("-m", "pip", "install", "-c", "constraints.txt")
        run(session, bin_dir, "python", *pip, *requirements("tests"), *editable)
        stamp.write_text(wanted)
    return bin_dir


def cuda_devices() -> int:
    """Count the GPUs that the NVIDIA driver offers, before torch is there to be asked."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    failed = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    return 0 if failed else count.value
