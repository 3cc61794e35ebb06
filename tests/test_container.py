"""Is a container read exactly as it was written, and is one that differs in any bit refused?"""

import hashlib
import json
import random
import struct

import pytest

from ep.container import (
    ALIGNMENT,
    MAGIC,
    Boundary,
    Code,
    Container,
    Cut,
    Partition,
    is_container,
    pack,
    unpack,
)
from ep.errors import InvalidModel

PREFIX = struct.Struct("<8sIIQ32s")
KEYS = [c * 64 for c in "abcdef"]
HELD = Container(
    "ep.jax",
    "0.10",
    "jaxlib 0.10 / platform cpu",
    (
        Partition("p0", (Boundary("float32", (None, 3)), Boundary("int4", (8,), True)), (Boundary("bool"),), b"graph"),
        Partition("p1", (), (Boundary("float16", ()),), b""),
    ),
    (Code(KEYS[0], (((2, 3), "float32"), ((), "int64")), b"\x00code" * 40), Code(KEYS[1], (), b"x")),
    (Cut(KEYS[2], 7),),
)
BLOB = pack(HELD)


def header_of(blob):
    length = PREFIX.unpack_from(blob)[2]
    return json.loads(blob[PREFIX.size : PREFIX.size + length]), blob[PREFIX.size + length :]


def forged(change, text=None):
    """The blob with another header, whose hash and lengths are right, and the same sections."""
    header, _ = header_of(BLOB)
    change(header)
    text = json.dumps(header).encode() if text is None else text
    parts, end = [text], PREFIX.size + len(text)
    for data in (b"graph", b"", HELD.codes[0].code, b"x"):
        parts += [bytes(-end % ALIGNMENT), data]
        end += -end % ALIGNMENT + len(data)
    return PREFIX.pack(MAGIC, 1, len(text), end, hashlib.sha256(text).digest()) + b"".join(parts)


def test_a_container_comes_back_whole():
    assert unpack(BLOB) == HELD and unpack(memoryview(BLOB)) == HELD
    assert unpack(pack(Container("s", "v", "f"))) == Container("s", "v", "f")
    assert is_container(BLOB) and not is_container(b"") and not is_container(BLOB[1:])
    assert unpack(forged(lambda header: None)) == HELD


def test_what_is_found_by_key():
    assert [entry.key for entry in HELD.entries()] == KEYS[:3]


def test_sections_are_aligned():
    for data in (b"graph", b"\x00code"):
        assert BLOB.index(data) % ALIGNMENT == 0


def test_every_flipped_bit_is_refused():
    for at in range(len(BLOB)):
        changed = bytearray(BLOB)
        changed[at] ^= 1 << (at % 8)
        with pytest.raises(InvalidModel, match="cannot be read as a stored context"):
            unpack(changed)


def test_every_other_length_is_refused():
    for size in range(len(BLOB)):
        with pytest.raises(InvalidModel):
            unpack(BLOB[:size])
    with pytest.raises(InvalidModel, match=rf"has {len(BLOB) + 1} bytes and says that it has {len(BLOB)}"):
        unpack(BLOB + b"\0")


def test_random_damage_is_refused():
    rng = random.Random(5)
    for _ in range(500):
        changed = bytearray(BLOB)
        a, b = sorted(rng.sample(range(len(BLOB)), 2))
        how = rng.randrange(4)
        if how == 0:
            del changed[a:b]
        elif how == 1:
            changed[a:a] = rng.randbytes(b - a)
        elif how == 2:
            changed[a:b] = rng.randbytes(b - a)
        else:
            changed[a:b] = bytes(reversed(changed[a:b]))
        if changed != BLOB:
            with pytest.raises(InvalidModel):
                unpack(changed)


def first(header, name):
    return header[name][0]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda h: h.pop("cuts"), "has fields"),
        (lambda h: h.update(more=1), "has fields"),
        (lambda h: h.update(source=3), "'source' of the header is int"),
        (lambda h: h.update(partitions={}), "'partitions' of the header is dict"),
        (lambda h: h.update(codes=[3]), "int where an object belongs"),
        (lambda h: first(h, "codes").update(key="A" * 64), "is not a key"),
        (lambda h: first(h, "codes").update(key=KEYS[1]), "occurs twice"),
        (lambda h: first(h, "cuts").update(key=KEYS[1]), "occurs twice"),
        (lambda h: first(h, "cuts").update(step=-1), "negative"),
        (lambda h: first(h, "cuts").update(step=True), "'step' of the header is bool"),
        (lambda h: first(h, "codes").update(arguments=[[[2, -3], "float32"]]), "-3' is not a dimension"),
        (lambda h: first(h, "codes").update(arguments=[[[2, None], "float32"]]), "'None' is not a dimension"),
        (lambda h: first(h, "codes").update(arguments=[[[1 << 63], "float32"]]), "is not a dimension"),
        (lambda h: first(h, "codes").update(arguments=[[[2.0], "float32"]]), "is not a dimension"),
        (lambda h: first(h, "codes").update(arguments=[[[2], "object"]]), "'object' is not a dtype"),
        (lambda h: first(h, "codes").update(arguments=[[[2], ["float32"]]]), "is not a dtype"),
        (lambda h: first(h, "codes").update(arguments=["float32"]), "not a pair"),
        (lambda h: first(h, "partitions").update(name="p1"), "partition 'p1' occurs twice"),
        (lambda h: first(h, "partitions").update(outputs=[["bool", 3, False]]), "a shape is not a list"),
        (lambda h: first(h, "partitions").update(outputs=[["bool", [3], 0]]), "packing is not"),
        (lambda h: first(h, "partitions").update(outputs=[["bool", [3]]]), "not a triple"),
        (lambda h: h["sections"].pop(), "lists 3 sections and needs 4"),
        (lambda h: first(h, "sections").update(kind="code"), "is of kind 'code', not 'onnx'"),
        (lambda h: first(h, "sections").update(kind="pickle"), "is of kind 'pickle'"),
        (lambda h: first(h, "sections").update(length=-5), "section 0 ends"),
        (lambda h: first(h, "sections").update(length=1 << 60), "section 0 ends"),
        (lambda h: first(h, "sections").update(length=4), "differs from its SHA-256"),
        (lambda h: first(h, "sections").update(sha256="0" * 64), "differs from its SHA-256"),
        (lambda h: h["sections"][3].update(length=0, sha256=hashlib.sha256(b"").hexdigest()), "left over"),
    ],
)
def test_a_forged_header_is_refused(change, why):
    with pytest.raises(InvalidModel) as raised:
        unpack(forged(change))
    assert why in raised.value.why


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b"[" * 100_000, "recursion"),
        (b'{"source": NaN}', "NaN"),
        (b'{"source": "a", "source": "b"}', "twice"),
        (b"\xff\xfe", "utf-8"),
        (b"", "Expecting value"),
        (b"[]", "list where an object belongs"),
    ],
)
def test_text_that_is_no_header_is_refused(text, why):
    with pytest.raises(InvalidModel) as raised:
        unpack(forged(lambda header: None, text))
    assert why in raised.value.why


def test_another_version_is_named():
    changed = bytearray(BLOB)
    struct.pack_into("<I", changed, 8, 2)
    with pytest.raises(InvalidModel, match="version 2 of the format; this ep-runtime reads version 1"):
        unpack(changed)
