"""The one thing that pyproject.toml cannot say for good yet: the codec's kernels, a C extension for the limited API.

Without a C compiler the install goes on, and plain numpy does their work (sync/codec/kernels.py).
"""

import sysconfig

from setuptools import Extension, setup

KERNELS = "sync/codec/_kernels"
ABI3 = not sysconfig.get_config_var("Py_GIL_DISABLED")  # free-threaded Pythons before 3.15 have no limited API

setup(
    ext_modules=[
        Extension(
            "sync.codec._kernels.native",
            [
                f"{KERNELS}/{name}.c"
                for name in ("module", "tables", "ctx_decode", "ctx_encode", "ctx_counts", "planes")
            ],
            depends=[f"{KERNELS}/core.h", f"{KERNELS}/words.h"],
            define_macros=[("Py_LIMITED_API", "0x030B0000")] if ABI3 else [],
            extra_compile_args=["-std=c11", "-O3", "-g0", "-fvisibility=hidden"],
            py_limited_api=ABI3,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp311"}} if ABI3 else {},  # one wheel for all later Pythons
)
