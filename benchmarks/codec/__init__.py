"""The parameter codec beside other ways to the same file: `python -m benchmarks.codec` for all of it (`compare`)."""

from __future__ import annotations

from benchmarks.report import Scale, Table


def run(scale: Scale) -> list[Table]:
    """What needs nothing from elsewhere: generated pairs, peers without a package. Loaded when it is called: the child
    processes of the benchmark are modules of this package, and want none of the rest."""
    from benchmarks.codec.compare import Options, run

    return run(scale, Options(size=0.07, names=("fine-tune", "identical")) if scale.quick else Options())
