# SPDX-License-Identifier: Apache-2.0
"""What every suite shares: the rank fixture, the gpu marker, and no pass by skipping alone."""

import os

import hypothesis
import pytest

from testing.fake import fake_group
from testing.ranks import DEVICE, device_problem, run_ranks

__all__ = ["fake_group", "run_ranks"]

# No deadline: machines that run tests are shared, and a slow example is no wrong one.
hypothesis.settings.register_profile("default", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "default")


def pytest_configure(config):
    if problem := device_problem():
        pytest.exit(problem, returncode=2)


def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and DEVICE != "cuda":
        pytest.skip("needs a CUDA device; run it with `nox -s tests_gpu`")


def pytest_sessionfinish(session, exitstatus):
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if exitstatus == pytest.ExitCode.OK and session.testscollected and reporter:
        ran = any(reporter.stats.get(word) for word in ("passed", "xfailed"))
        if not ran and not session.config.option.collectonly:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
            session.shouldfail = "every test was skipped, so nothing was checked"


def pytest_terminal_summary(terminalreporter):
    if reason := terminalreporter._session.shouldfail:
        terminalreporter.write_line(f"FAILED: {reason}", red=True)
