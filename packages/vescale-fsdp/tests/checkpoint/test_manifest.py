# SPDX-License-Identifier: Apache-2.0
import json

import pytest

from vescale.fsdp.checkpoint.manifest import MANIFEST, Manifest, read_manifest, text_of

GOOD = Manifest(
    4, 2, 3, {"seen": [16, float("inf"), "\xfc"]}, {"part": (7, 99), "other": (0, None)}
)


def test_a_manifest_is_read_as_it_was_written(tmp_path):
    (tmp_path / MANIFEST).write_text(text_of(GOOD))
    assert read_manifest(tmp_path) == GOOD


def test_any_damage_is_a_value_error_that_begins_with_has(tmp_path):
    text = text_of(GOOD)
    data = json.loads(text)
    del data["crc32"]
    damages = [b"\xff\xfe" + text.encode(), text.replace("16", "17").encode(), b"[" * 100_000]
    damages += [text.encode()[:n] for n in (0, 1, 30, len(text) - 1)]
    damages += [word.encode() for word in ("[]", "null", "3", "{}")]
    for key, values in {
        "format": (None, "1", [1]),
        "step": (None, "4", True),
        "sequence": (None, "2", 2.0),
        "world_size": ("3",),
        "files": (None, [], {"part": "ab"}, {"part": [7]}, {"part": ["7", 1]}, {"part": [7, "x"]}),
    }.items():
        damages += [json.dumps({**data, key: value}).encode() for value in values]
    for name in data:
        damages.append(json.dumps({k: v for k, v in data.items() if k != name}).encode())
    for damage in damages:
        (tmp_path / MANIFEST).write_bytes(damage)
        with pytest.raises(ValueError, match=r"^has a broken checkpoint\.json"):
            read_manifest(tmp_path)
    (tmp_path / MANIFEST).write_text(json.dumps(data))  # the checksum may be missing
    assert read_manifest(tmp_path) == GOOD
