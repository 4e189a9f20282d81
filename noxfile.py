# SPDX-License-Identifier: Apache-2.0
"""Every check that CI runs. ``nox -l`` lists them; ``nox -s "tests-3.11(fsdp)"`` runs one."""

import nox

nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_existing_virtualenvs = True
nox.options.sessions = ["lint", "layers", "tests", "tests_root"]
PACKAGES = ("dtensor", "fsdp", "legacy")  # each may import only those before it
GROUPS = nox.project.load_toml("pyproject.toml")


def install(session: nox.Session, group: str, *packages: str) -> None:
    """Install a dependency group, and packages from this checkout so siblings stay in step."""
    local = [arg for name in packages for arg in ("-e", f"packages/vescale-{name}")]
    # constraints.txt pins what CI tests (torch among it); the packages themselves give ranges.
    session.install("-c", "constraints.txt", *nox.project.dependency_groups(GROUPS, group), *local)


@nox.session
def lint(session: nox.Session) -> None:
    """Check format and lint, with the one configuration at the root."""
    install(session, "lint")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")


@nox.session
def layers(session: nox.Session) -> None:
    """Check the arrows between layers; needs no torch."""
    install(session, "tests")
    session.run("pytest", "--noconftest", "tests/test_layers.py")


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def tests(session: nox.Session, package: str) -> None:
    """Run one package's tests against its siblings in this checkout."""
    install(session, "tests", *PACKAGES[: PACKAGES.index(package) + 1])
    session.run("pytest", f"packages/vescale-{package}/tests", *session.posargs)


@nox.session
def tests_root(session: nox.Session) -> None:
    """Run the tests that need all packages: wheels, end-to-end training, examples."""
    install(session, "tests", *PACKAGES)
    session.run("pytest", "tests", *session.posargs)


@nox.session
@nox.parametrize("package", PACKAGES, ids=PACKAGES)
def build(session: nox.Session, package: str) -> None:
    """Build one package's sdist and wheel into dist/."""
    session.install("build")
    session.run("python", "-m", "build", "--outdir", "dist", f"packages/vescale-{package}")
