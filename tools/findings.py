# SPDX-License-Identifier: Apache-2.0
"""How the checks of a release say what they found. Needs the standard library only."""

from collections.abc import Iterable

Finding = tuple[str, str]  # what was checked, and what is wrong with it: "" if nothing


def report(findings: Iterable[Finding]) -> int:
    """Print each finding as it comes; return the number of problems."""
    problems = 0
    for what, problem in findings:
        problems += bool(problem)
        print(f"  FAIL  {what}: {problem}" if problem else f"  ok    {what}", flush=True)
    return problems
