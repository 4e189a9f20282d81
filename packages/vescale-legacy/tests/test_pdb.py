# SPDX-License-Identifier: Apache-2.0
"""The debugger in a child process, driven through a pipe in the place of a terminal."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import multiprocessing
import sys

from vescale.legacy.debug.pdb import ForkedPdb

def work():
    secret = 6 * 7
    ForkedPdb().set_trace()
    secret += 1
    ForkedPdb().set_trace()
    print("end", secret, "stdin is back:", sys.stdin.name)

if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=work)
    child.start()
    child.join()
    sys.exit(child.exitcode)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="descriptor 0 is a POSIX matter")
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_process_can_be_debugged(tmp_path, method):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    # Two stops, read from one pipe: what the first one read ahead must not be lost.
    done = subprocess.run(
        [sys.executable, str(script), method],
        input="p secret\np secret * 2\nc\np secret\nc\n",
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    assert done.returncode == 0, done.stderr
    for line in ("42", "84", "43", "end 43"):
        assert line in done.stdout
    assert "stdin is back: 0" not in done.stdout
