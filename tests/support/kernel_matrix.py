"""Which cases the kernels of every backend are compared with the reference in: few for the interpreter, a matrix for a GPU."""

import dataclasses

import torch
from kernel_cases import Case

from hf_lowbit_kv.formats import HEAD_DIMS

EIGEN_2 = {"keys": "static-54222100", "values": "static-2-tn"}
EIGEN_3 = {"keys": "static-64332222", "values": "static-3-tn"}

SMALL = [
    Case(),
    Case(keys="int2-channel", values="int2-token", lengths=(70, 33)),
    Case(keys="int8-token", values="int8-token", sink=0, residual=0, lengths=(33, 64)),
    Case(keys="int2-channel-g32", values="int2-token-g32", page_size=64, residual=64, lengths=(140, 1), heads=1),
    Case(keys="fp8", values="fp8", lengths=(70, 33), heads=1, sink=0, residual=0),
    Case(keys="fp8-centered", values="fp8", lengths=(100, 33), heads=1, key_offset=300.0),
    Case(
        keys="fp8-centered",
        values="fp8-centered",
        head_dim=80,
        tokens=5,
        padded=True,
        heads=1,
        softcap=20.0,
        sinks=True,
    ),
    Case(keys="dense", values="int4-channel", lengths=(0, 130), tokens=5, padded=True, sinks=True, heads=1),
    Case(groups=3, softcap=20.0, head_dim=80, head_dim_v=96, lengths=(33, 100), tokens=9, heads=1),
    Case(keys="int4-token", values="dense", lengths=(31, 64), tokens=20, sink=0, residual=0, padded=True, heads=1),
    Case(keys="int8-token-g64", values="int4-token-g32", head_dim=128, head_dim_v=64, lengths=(65, 3), groups=1),
    Case(keys="int4-channel", values="int8-channel", dtype=torch.float32),
    Case(outliers=True, heads=1),
    *(
        Case(keys="int8-token", values=values, heads=1, head_dim=128, lengths=(600,), value_offset=-100.0)
        for values in ("int8-token", "int4-token-g32", "int2-token")
    ),
    *(
        Case(keys=keys, values="int8-token", heads=1, head_dim=128, lengths=(600,), key_size=2.0**-10)
        for keys in ("int8-channel", "int4-channel", "int8-token", "boosted2-r0.125")
    ),
    Case(heavy_sink=5.0, heads=1, groups=1, lengths=(300,)),
    Case(
        heavy_sink=5.0, heads=1, groups=1, lengths=(300,), keys="int8-token", values="int8-token", dtype=torch.bfloat16
    ),
    Case(heavy_sink=5.0, heads=1, groups=1, lengths=(300,), keys="boosted2-r0.125", values="int2-token-g32"),
    Case(outliers=True, values="int8-token", keys="int8-token", heads=1),
    Case(lengths=(0, 0), heads=1, sinks=True),
    Case(capacity=140, lengths=(100, 90), heads=1),
    Case(keys="boosted2-r0.125", values="int2-token"),
    Case(keys="vq-d4b8", values="vq-d2b5"),
    Case(**EIGEN_2, lengths=(100, 33)),
    Case(keys="static-65444333", values="static-2-tn", lengths=(100,), heads=1),
    Case(keys="int6-token", values="int5-token", lengths=(100, 33), heads=1, sink=0, residual=0),
    Case(keys="int5-channel", values="int6-channel-g32", head_dim=80, lengths=(100,), heads=1, tokens=5, padded=True),
    Case(**EIGEN_3, lengths=(100,), head_dim=128, groups=1, tokens=5, dtype=torch.bfloat16),
    Case(keys="vq-d8b12", values="int2-token", head_dim=80, lengths=(100,), groups=1, tokens=5, dtype=torch.bfloat16),
    Case(
        keys="boosted2-r0.25-variance",
        values="int2-token",
        head_dim=96,
        tokens=5,
        padded=True,
        lengths=(140, 70),
        heads=1,
    ),
    Case(keys="boosted2-r1", values="boosted2-r0.25", head_dim=80, head_dim_v=64, heads=1, dtype=torch.float32),
    Case(keys="boosted2-r0", values="boosted2-r1-random", heads=1),
    Case(keys="boosted2-r0.125", values="boosted2-r0.125", outliers=True, heads=1),
    Case(keys="boosted2-r0.125", values="int4-token", head_dim=512, lengths=(70, 33), heads=1),
    Case(keys="int2-channel", values="fp8", head_dim=192, head_dim_v=128, lengths=(70, 33), tokens=9, heads=1),
    # pages whose words of high codes are a plane of their own: in two tiles, in eight, in the other orientation
    Case(keys="boosted2-r0.125", values="int2-token", head_dim=128, page_size=128, lengths=(300, 130)),
    Case(keys="boosted2-r0.3-range", values="int2-token", page_size=256, lengths=(530,), heads=1, dtype=torch.float32),
    Case(keys="boosted2-r0.25", values="int2-channel-g32", page_size=128, lengths=(300,), heads=1, outliers=True),
    Case(keys="boosted2-r0.25", values="int2-token", page_size=256, lengths=(530, 300), tokens=9, padded=True, heads=1),
]
SMALL_STORES = [
    (Case(heads=1), [37, 0, 60, 0, 0]),
    (Case(padded=True, keys="int2-channel", values="int2-token", capacity=120), [20, 1, 150, 0, 0]),
    (Case(heads=1, keys="int4-token", values="int8-token-g32", residual=0, sink=3, padded=True), [1, 0, 0, 40, 30]),
    (Case(heads=1, keys="int8-channel", values="dense", residual=0, outliers=True), [30, 0, 1, 40]),
    (Case(heads=1, keys="int2-channel-g32", values="int4-channel", head_dim=80, page_size=64, residual=5), [130]),
    (Case(heads=1, keys="fp8", values="fp8-static", residual=0, sink=3, padded=True, outliers=True), [30, 0, 40]),
    (Case(heads=1, keys="fp8-centered", values="fp8", padded=True, outliers=True, key_offset=300.0), [70, 0, 40]),
    (Case(keys="vq-d4b5", values="vq-d2b8", lengths=(5, 37), residual=5), [45, 0]),
    (Case(keys="vq-d2b8", values="vq-d4b10", lengths=(5,), heads=1, residual=5, ties=True), [45, 0]),
    (Case(**EIGEN_2, heads=1, padded=True, lengths=(5, 37), residual=5), [55, 0]),
    (Case(**EIGEN_3, heads=1, lengths=(5,), outliers=True), [70]),
    (Case(keys="static-4", values="static-2-tn", heads=1, lengths=(5,), outliers=True), [70]),
    (Case(keys="int6-token", values="int5-token", heads=1, residual=0, sink=3, outliers=True), [30, 0, 40]),
    (Case(keys="int5-channel-g32", values="int6-channel", heads=1, head_dim=80, lengths=(5,)), [70]),
    (Case(heads=1, keys="boosted2-r0.125", values="int2-token", padded=True, page_size=64), [90, 70, 0, 0]),
    (Case(heads=1, keys="boosted2-r0.25-variance", values="boosted2-r1", head_dim=80, head_dim_v=96), [60, *[0] * 9]),
    (Case(heads=1, keys="boosted2-r0.25", values="int4-token", head_dim=512, lengths=(5,)), [70, 0]),
    (Case(heads=1, keys="boosted2-r0.25-random5", values="boosted2-r0.3-range", residual=0, outliers=True), [70, 0]),
    (
        Case(heads=1, keys="boosted2-r0.5", values="boosted2-r0", residual=0, outliers=True, dtype=torch.float32),
        [40, 30],
    ),
]

#: codebooks of all sizes, entries that repeat, tokens far from all entries
CODEBOOK_STORES = [
    (Case(keys="vq-d8b12", values="vq-d4b10", lengths=(5,), heads=1), [70]),
    (Case(keys="vq-d2b7", values="vq-d8b12", lengths=(5,), heads=1, outliers=True, dtype=torch.bfloat16), [70]),
    (Case(keys="vq-d2b8", values="vq-d2b3", lengths=(5,), heads=1, ties=True), [70]),
    (Case(keys="vq-d2b12", values="vq-d4b6", lengths=(5,), heads=1, ties=True, head_dim=128), [70]),
]

#: head size, dtype, transform: what kernels apply by themselves
TRANSFORMS = [
    (head_dim, dtype, name)
    for head_dim in HEAD_DIMS
    for dtype in (torch.float16, torch.bfloat16, torch.float32)
    for name in ("hadamard", "smooth", "smooth+hadamard", "hadamard+smooth")
]

#: formats and transforms of steps that are captured in a CUDA graph
GRAPHS = [
    {"keys": "int8-token", "values": "int4-token", "residual": 0},
    {"keys": "int8-token", "values": "int4-token", "residual": 128},
    {"keys": "boosted2-r0.125", "values": "int2-token", "residual": 128, "transform": "hadamard"},
    {"keys": "fp8", "values": "fp8", "residual": 0},
    {"keys": "fp8", "values": "fp8", "residual": 128},
    {"keys": "fp8-centered", "values": "fp8", "residual": 128},
    {**EIGEN_2, "residual": 128, "transform": "hadamard", "value_transform": "hadamard"},
]


#: codebooks through `lookup`
SMALL_LOOKUPS = [
    # indices of four tokens in a number, and of two; entries in parts; indices that end in the next word
    Case(keys="vq-d4b8", values="vq-d8b6", head_dim=128, page_size=128, lengths=(300, 130)),
    Case(keys="vq-d8b5", values="vq-d4b8", page_size=64, lengths=(200,), tokens=9, padded=True, heads=1),
    Case(keys="vq-d2b3", values="vq-d8b4", page_size=128, lengths=(300,), head_dim=80, groups=10, dtype=torch.float32),
]


def transformed() -> list[Case]:
    """Few query rows and many, one block of the window for the chunk and several, padding, every head size."""
    cases = []
    for i, head_dim in enumerate(HEAD_DIMS):
        for j, (groups, tokens) in enumerate(((4, 1), (1, 1), (3, 5), (16, 1), (4, 40))):
            keys = ("int4-channel", "boosted2-r0.125", "dense")[(i + j) % 3]
            if head_dim > 256 and keys == "boosted2-r0.125":  # Triton's only: a map names channels of the whole head
                keys = "int8-token"
            options = {"keys": keys, "groups": groups, "tokens": tokens, "padded": tokens > 1, "lengths": (700, 1, 290)}
            cases.append(Case(head_dim=head_dim, dtype=(torch.float16, torch.bfloat16)[(i + j) % 2], **options))
    names = ("hadamard", "smooth+hadamard", "hadamard+smooth", "smooth", "matrix")
    both = [dataclasses.replace(cases[i], transform=name, value_transform=names[-i]) for i, name in enumerate(names)]
    own = [
        Case(**EIGEN_2, head_dim=128, page_size=128, residual=128, lengths=(700, 1, 290)),
        Case(**EIGEN_3, groups=3, tokens=5, padded=True, lengths=(700, 1, 290), dtype=torch.bfloat16),
        Case(keys="int4-channel", values="dense", head_dim=256, groups=16, tokens=4, lengths=(300, 90)),
        Case(**EIGEN_2, head_dim=128, page_size=128, residual=128, groups=16, lengths=(300,) * 40),
    ]
    both += [dataclasses.replace(case, transform="eigen", value_transform="hadamard") for case in own]
    # what a center takes off all scores counts here: few rows, many, padding, more tokens than one launch projects
    both += [
        Case(**EIGEN_2, head_dim=128, page_size=128, lengths=(700, 1, 290), transform="eigen", softcap=20.0),
        Case(**EIGEN_3, groups=3, tokens=5, padded=True, lengths=(300, 1), transform="eigen", sinks=True),
        Case(
            keys="int4-channel", groups=2, tokens=60, lengths=(90,), transform="smooth+eigen", softcap=9.0, sinks=True
        ),
    ]
    return [dataclasses.replace(case, transform="hadamard") for case in cases] + both


def format_names() -> list[str]:
    """Every format; of those with a free parameter its ends and what presets use."""
    groups = ("", "-g32", "-g64", "-g128")
    affine = [
        f"int{bits}-{axis}{group}" for bits in (2, 4, 5, 6, 8) for axis in ("channel", "token") for group in groups
    ]
    ratios = ("r0", "r0.125", "r0.125-random3", "r0.25-variance", "r0.3-range", "r1")
    return [*affine, "dense", *(f"boosted2-{ratio}" for ratio in ratios), "fp8", "fp8-centered"]


def matrix() -> list[Case]:
    page = 128
    base = {"head_dim": 128, "residual": 128, "page_size": page, "sink": 32}
    lengths = (1000, 1, 417)
    names = format_names()
    cases = []
    # each format is one case's keys and one case's values, with one token or four
    for i, name in enumerate(names):
        partner = names[(i * 7 + 5) % len(names)]
        dtype, tokens = (torch.float16, torch.bfloat16)[i % 2], (1, 4)[i // 2 % 2]
        cases.append(Case(keys=name, values=partner, dtype=dtype, lengths=lengths, tokens=tokens, **base))
    pairs = [
        ("int4-channel", "int4-token"),
        ("int2-channel", "int2-token"),
        ("int8-token", "int8-token"),
        ("int6-token", "int6-token"),
    ]
    pairs += [("boosted2-r0.125", "int2-token"), ("boosted2-r0.25", "int2-token"), ("fp8", "fp8")]
    pairs += [("fp8-centered", "fp8")]
    shapes = ((1, torch.float16), (3, torch.bfloat16), (8, torch.float16))
    for number, (keys, values) in enumerate(pairs):
        pair = {"keys": keys, "values": values}
        for i, dim in enumerate((64, 80, 96, 128, 256)):
            # two of the three shapes; every pair meets all of them, and every head size
            sized = base | {"head_dim": dim}
            for groups, dtype in (shapes[(number + i) % 3], shapes[(number + i + 1) % 3]):
                cases.append(Case(groups=groups, dtype=dtype, lengths=lengths, **pair, **sized))
            if (number + i) % 2 == 0:
                cases.append(Case(tokens=300, padded=True, lengths=(700, 0, 129), dtype=torch.float16, **pair, **sized))
        for length in (1, page - 1, page, page + 1, 0):
            for residual in (0, 128):
                small = base | {"residual": residual, "sink": 0}
                cases.append(Case(lengths=(length,), dtype=torch.bfloat16, **pair, **small))
        for i, widths in enumerate(({"head_dim": 512}, {"head_dim": 192, "head_dim_v": 128})):
            sized = base | widths
            cases.append(Case(groups=8, dtype=(torch.float16, torch.bfloat16)[i], lengths=lengths, **pair, **sized))
            cases.append(Case(groups=2 + 14 * i, lengths=lengths, **pair, **sized))
            if (number + i) % 2 == 0:
                cases.append(Case(tokens=300, padded=True, lengths=(700, 0, 129), **pair, **sized))
        cases.append(Case(softcap=30.0, sinks=True, lengths=lengths, **pair, **base))
        cases.append(Case(softcap=30.0, sinks=True, tokens=4, padded=True, lengths=lengths, **pair, **base))
        cases.append(Case(sinks=True, tokens=300, groups=3, lengths=lengths, dtype=torch.bfloat16, **pair, **base))
        cases.append(Case(groups=16, tokens=4, lengths=lengths, **pair, **base))
        cases.append(Case(outliers=True, lengths=lengths, **pair, **base))
        cases.append(Case(value_offset=-100.0, lengths=lengths, **pair, **base))
        cases.append(Case(key_size=2.0**-10, lengths=lengths, **pair, **base))
        cases.append(Case(heavy_sink=5.0, lengths=(1500,) * 40, groups=1, heads=8, **pair, **base))
        cases.append(Case(outliers=True, lengths=lengths, dtype=torch.bfloat16, tokens=300, **pair, **base))
        cases.append(Case(lengths=lengths, dtype=torch.float32, **pair, **base))
        cases.append(Case(lengths=(900, 850), capacity=1000, **pair, **base))
        cases.append(Case(lengths=(40000,), heads=1, **pair, **base))
    for page_size in (32, 64, 256):
        cases.append(Case(lengths=lengths, **base | {"page_size": page_size}))
        cases.append(
            Case(keys="boosted2-r0.125", values="int2-token", lengths=lengths, **base | {"page_size": page_size})
        )
        cases.append(
            Case(keys="int8-token", values="dense", lengths=lengths, **base | {"page_size": page_size, "residual": 0})
        )
    cases.append(
        Case(head_dim=96, head_dim_v=64, lengths=lengths, **{k: v for k, v in base.items() if k != "head_dim"})
    )
    return cases


def stores() -> list[tuple[Case, list[int]]]:
    found = []
    names = format_names()
    for i, name in enumerate(names):
        partner = names[(i * 5 + 3) % len(names)]
        for residual in (0, 128):
            case = Case(
                keys=name, values=partner, head_dim=128, residual=residual, page_size=128, sink=(0, 5)[i % 2], padded=i % 3 > 0,
                dtype=(torch.float16, torch.bfloat16, torch.float32)[i % 3], outliers=i % 4 == 0, lengths=(1, 1),
            )  # fmt: skip
            found.append((case, [1, 0, 250, 0, 0, 127, 0, 0, 3, 400, *[0] * 3]))
    for dim in (64, 80, 96, 256):
        for keys, values, residual in (
            ("int4-channel", "int4-token", 128),
            ("int2-token", "int8-channel", 0),
            ("boosted2-r0.25", "boosted2-r0.125-variance", 128),
            ("fp8", "fp8", 0),
            ("fp8", "fp8", 128),
            ("fp8-centered", "fp8", 128),
        ):
            case = Case(
                keys=keys, values=values, head_dim=dim, residual=residual, page_size=128, padded=True, lengths=(1, 1)
            )
            found.append((case, [300, 0, 100, 0]))
    long = Case(head_dim=128, residual=128, page_size=128, sink=32, lengths=(1,))
    found.append((long, [100, *[0] * 330]))
    found.append((Case(keys="int4-token", residual=0, lengths=(1,), capacity=200), [100, *[0] * 130]))
    found.append((Case(lengths=(1, 1), capacity=150), [100, 100, 0, 0]))
    return found


def codebook_attends() -> list[Case]:
    """Codebooks: every size, head size and number of query rows that is served in another way."""
    base = {"head_dim": 128, "residual": 128, "page_size": 128, "sink": 32, "lengths": (1000, 1, 417)}
    sizes = [(dim, bits) for bits in (3, 4, 5, 6, 7, 8, 12) for dim in (2, 4, 8)]
    cases = []
    for i, (dim, bits) in enumerate(sizes):
        partner = "vq-d{}b{}".format(*sizes[(i * 5 + 2) % len(sizes)])
        options = {"dtype": (torch.float16, torch.bfloat16)[i % 2], "groups": (4, 1, 8, 12)[i % 4]}
        cases.append(Case(keys=f"vq-d{dim}b{bits}", values=partner, **options, **base))
    for dim in (64, 80, 96, 128, 256):
        for keys, values, groups, tokens in (("4b8", "4b8", 4, 1), ("8b8", "2b8", 16, 1), ("4b8", "8b6", 4, 6)):
            options = {"groups": groups, "tokens": tokens, "padded": tokens > 1}
            cases.append(Case(keys=f"vq-d{keys}", values=f"vq-d{values}", **options, **base | {"head_dim": dim}))
    pair = {"keys": "vq-d4b8", "values": "vq-d4b8"}
    cases += [Case(**pair, **base | {"page_size": size}) for size in (32, 64, 256)]
    cases += [Case(**pair, **base | {"lengths": lengths}) for lengths in ((40000,), (129, 128, 0))]
    cases += [Case(softcap=30.0, sinks=True, **pair, **base), Case(dtype=torch.float32, **pair, **base)]
    cases += [Case(keys="vq-d4b8", values="int2-token", **base), Case(keys="int4-channel", values="vq-d4b8", **base)]
    return cases


def static_attends() -> list[Case]:
    """Static codes: head sizes, patterns that planes of every width come from, pages, and steps from tiny to huge."""
    base = {"head_dim": 128, "residual": 128, "page_size": 128, "sink": 32}
    half, bf16, lengths = torch.float16, torch.bfloat16, (1000, 1, 417)
    cases = []
    for pair in (EIGEN_2, EIGEN_3):
        for dim, groups, dtype in ((64, 1, half), (64, 8, bf16), (128, 3, bf16), (128, 8, half), (256, 4, half)):
            cases.append(Case(groups=groups, dtype=dtype, lengths=lengths, **pair, **base | {"head_dim": dim}))
        for length in (1, 127, 128, 129):
            cases.append(
                Case(lengths=(length,), dtype=bf16, **pair, **base | {"residual": length % 2 * 128, "sink": 0})
            )
        cases.append(Case(tokens=300, padded=True, lengths=(700, 0, 129), **pair, **base))
        cases.append(Case(groups=16, tokens=4, lengths=lengths, **pair, **base))
        cases.append(Case(softcap=30.0, sinks=True, tokens=4, padded=True, lengths=lengths, **pair, **base))
        cases += [Case(outliers=True, lengths=lengths, dtype=dtype, **pair, **base) for dtype in (half, bf16)]
        cases.append(Case(heavy_sink=5.0, lengths=(1500,) * 40, groups=1, heads=8, **pair, **base))
        cases.append(Case(lengths=(40000,), heads=1, **pair, **base))
        cases += [Case(lengths=lengths, **pair, **base | {"page_size": size}) for size in (32, 64, 256)]
        cases += static_sizes(lengths=lengths, **pair, **base)
    cases.append(Case(keys="static-442200", values="static-2-tn", lengths=lengths, **base | {"head_dim": 96}))
    cases.append(Case(keys="static-53222110", values="static-4-tn", lengths=lengths, **base))
    for values, dtype in (("static-2-tn", half), ("static-3-tn", bf16), ("static-4-tn", half)):
        cases.append(Case(keys="static-65444333", values=values, lengths=lengths, dtype=dtype, **base))
        cases.append(Case(keys=EIGEN_2["keys"], values=values, outliers=True, lengths=lengths, dtype=dtype, **base))
    cases.append(Case(keys="static-4", values="static-4-tn", lengths=lengths, **base))
    cases.append(Case(keys=EIGEN_2["keys"], values="int2-token", lengths=lengths, **base))
    cases.append(Case(keys="int4-channel", values=EIGEN_2["values"], lengths=lengths, **base))
    cases.append(Case(keys=EIGEN_2["keys"], values=EIGEN_3["values"], head_dim_v=64, lengths=lengths, **base))
    return cases


def static_sizes(**options) -> list[Case]:
    """Steps that are tiny and huge altogether, and over twelve orders of magnitude."""
    half, bf16 = torch.float16, torch.bfloat16
    return [
        Case(key_size=2.0**-10, value_size=2.0**-10, dtype=half, **options),
        Case(key_size=2.0**-20, value_size=2.0**-20, dtype=bf16, **options),
        Case(key_size=2.0**8, value_size=2.0**8, dtype=half, **options),
        Case(key_size=2.0**20, value_size=2.0**20, dtype=bf16, **options),
        Case(spread="keys", **options),
    ]


def static_stores() -> list[tuple[Case, list[int]]]:
    """Bytes of static codes."""
    chunks = [1, 0, 250, 0, 0, 127, 0, 0, 3, 400, *[0] * 3]
    base = {"residual": 128, "page_size": 128, "lengths": (1, 1)}
    patterns = [
        ("static-54222100", "static-2-tn"),
        ("static-64332222", "static-3-tn"),
        ("static-53222110", "static-4-tn"),
    ]
    without = [("static-65444333", f"static-{bits}-tn") for bits in (2, 3, 4)]
    return [
        (Case(keys=keys, values=values, head_dim=64, outliers=True, **base), chunks) for keys, values in without
    ] + [
        (
            Case(keys=keys, values=values, head_dim=dim, dtype=dtype, padded=padded, outliers=outliers, **base),
            chunks,
        )
        for (keys, values), dim, dtype, padded, outliers in zip(
            patterns * 3,
            (64, 128, 256) * 3,
            (torch.float16, torch.bfloat16) * 5,
            (False, True, True) * 3,
            (False,) * 4 + (True,) * 5,
        )
    ]
