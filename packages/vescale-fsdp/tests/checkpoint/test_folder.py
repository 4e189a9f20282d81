# SPDX-License-Identifier: Apache-2.0
import json
import shutil
from pathlib import Path

import pytest

from vescale.fsdp.checkpoint import folder as on_disk
from vescale.fsdp.checkpoint.folder import (
    MANIFEST,
    Manifest,
    find,
    name_of,
    prune,
    publish,
    recover,
)


def write(folder, step, text="numbers"):
    partial = on_disk.start(folder, step)
    (partial / "part").write_text(text)
    files = {name: (n, on_disk.checksum(partial / name)) for name, n in _files(partial).items()}
    manifest = Manifest(step, on_disk.next_sequence(folder), 2, {"seen": step * 4}, files)
    return partial, manifest


def _files(path):
    return on_disk.files_in(path)


def save(folder, step, text="numbers"):
    return publish(*write(folder, step, text))


def steps(folder):
    return [manifest.step for _, manifest in find(folder)[0]]


def test_the_newest_is_the_one_saved_last_whatever_its_step(tmp_path):
    for step in (3, 8, 5):  # an earlier run came as far as 8, and this one was set back to 3
        save(tmp_path, step)
    assert steps(tmp_path) == [5, 8, 3]
    save(tmp_path, 8, "other")
    (path, manifest), *_ = find(tmp_path)[0]
    assert (path.name, manifest.progress) == (name_of(8), {"seen": 32})
    assert (path / "part").read_text() == "other"
    assert sorted(p.name for p in tmp_path.iterdir()) == [*map(name_of, (3, 5, 8))]
    prune(tmp_path, 2)
    assert steps(tmp_path) == [8, 5]
    assert len([*tmp_path.iterdir()]) == 2


def test_what_is_not_complete_is_named(tmp_path):
    for step in range(1, 8):
        save(tmp_path, step)
    paths = {step: tmp_path / name_of(step) for step in range(1, 8)}
    (paths[1] / "part").unlink()
    (paths[2] / "part").write_text("numb")
    (paths[3] / MANIFEST).unlink()
    (paths[4] / MANIFEST).write_text("{")
    (paths[5] / MANIFEST).write_text(json.dumps({"format": 99}))
    (paths[6] / "part").write_text("bumbers")  # of the same size
    partial = on_disk.start(tmp_path, 9)
    complete, skipped = find(tmp_path)
    assert [path for path, _ in complete] == [paths[7], paths[6]]
    reasons = {item.path.name: item.reason for item in skipped}
    assert reasons[name_of(1)] == "lacks part"
    assert reasons[name_of(2)] == "has 4 bytes of part and not 7"
    assert reasons[name_of(3)] == f"has no {MANIFEST}"
    assert "broken" in reasons[name_of(4)]
    assert reasons[name_of(5)] == "has format 99, this version reads 1"
    assert reasons[partial.name] == "was not written to its end"
    (path, manifest) = complete[1]
    with pytest.raises(ValueError, match="other contents"):
        on_disk.check_contents(path, manifest, ["part"])
    on_disk.check_contents(*complete[0], ["part"])
    prune(tmp_path, 1)  # takes complete ones only: the others are for the user to look at
    assert paths[1].exists()
    assert not paths[6].exists()


def test_folders_that_cannot_be_listed_are_no_empty_ones(tmp_path):
    assert find(tmp_path / "nothing") == ([], [])
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectoryError):
        find(tmp_path / "file")


def test_links_and_files_in_place_of_checkpoints_stop_no_save(tmp_path, caplog):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    moved = save(folder, 1).rename(elsewhere)
    (folder / name_of(1)).symlink_to(elsewhere)
    assert steps(folder) == [1]
    save(folder, 2)
    prune(folder, 1)
    assert steps(folder) == [2]
    assert (moved / MANIFEST).exists()  # the link went, and not what it points to
    for other in (elsewhere, tmp_path / "gone"):
        (folder / name_of(3)).symlink_to(other)
        save(folder, 3)
        assert not (folder / name_of(3)).is_symlink()
        shutil.rmtree(folder / name_of(3))
    (folder / name_of(3)).write_text("a file")
    (folder / ".partial-file").write_text("a file")
    save(folder, 3)
    assert sorted(p.name for p in folder.iterdir()) == [name_of(2), name_of(3)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda path: (_ for _ in ()).throw(OSError("busy")))
        prune(folder, 1)
        save(folder, 4)
    assert steps(folder) == [4, 3]
    assert [*{record.levelname for record in caplog.records}] == ["WARNING"]
    assert "cannot be removed: busy" in caplog.text
    save(folder, 5)
    assert len([*folder.iterdir()]) == 3


def test_savers_of_one_folder_leave_each_other_alone(tmp_path):
    one = write(tmp_path, 1, "one")
    for step in (2, 1):  # another step, and the same
        save(tmp_path, step, "two")
    path = publish(*one)
    on_disk.stop(one[0])
    assert (path / "part").read_text() == "one"
    assert steps(tmp_path)[-1] == 2
    left, _ = write(tmp_path, 3)
    on_disk.stop(left)
    save(tmp_path, 4)
    assert not left.exists()


class CrashError(BaseException):
    """Stands for SIGKILL: nothing below handles it."""


def moments(folder, action):
    """Run ``action`` again and again, killed at each of its file operations in turn."""
    originals = {name: getattr(Path, name) for name in ("rename", "unlink", "mkdir", "rmdir")}
    done = False
    count = 0
    while not done:
        left = count

        def limited(name, original):
            def call(*args, **kwargs):
                nonlocal left
                if left == 0:
                    raise CrashError(name)
                left -= 1
                return original(*args, **kwargs)

            return call

        remove, write_file = shutil.rmtree, on_disk._write
        with pytest.MonkeyPatch.context() as patch:
            for name, original in originals.items():
                patch.setattr(Path, name, limited(name, original))
            patch.setattr(shutil, "rmtree", limited("rmtree", remove))
            patch.setattr(on_disk, "_write", limited("_write", write_file))
            try:
                action()
                done = True
            except CrashError:
                on_disk._being_written.clear()  # this process stands for the next one, too
        yield count
        count += 1


def test_a_crash_at_any_moment_leaves_old_or_new_complete(tmp_path):
    reference = tmp_path / "before"
    for step in (4, 6):
        save(reference, step, "old")
    for again in (6, 8):  # replaced, and new
        folder = tmp_path / str(again)
        seen = []

        def action(folder=folder, again=again):
            save(folder, again, "new")
            prune(folder, 1)

        def restore(folder=folder):
            shutil.rmtree(folder, ignore_errors=True)
            shutil.copytree(reference, folder)

        restore()
        for _ in moments(folder, action):
            recover(folder)
            complete, _ = find(folder)
            (path, manifest), *_ = complete
            text = (path / "part").read_text()
            seen.append(text)
            assert (text, manifest.step) in (("old", 6), ("new", again))
            # And whatever was left behind, the next save comes to its end.
            save(folder, 10)
            assert steps(folder)[0] == 10
            assert not [p for p in folder.iterdir() if p.name.startswith(".")]
            restore()
        assert seen[0] == "old"
        assert seen[-1] == "new"
        assert len(seen) > 5
