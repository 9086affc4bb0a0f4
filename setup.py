"""Builds the CPU kernels; everything else is in pyproject.toml.

They are plain shared libraries, loaded by `foredraft.models.native`, one for each instruction set worth a build of its
own, so that one wheel serves every machine. Without a compiler the install goes on: torch then does their work, slower.
"""

import platform

from setuptools import Extension, setup

LEVELS = {"v3": ["-march=x86-64-v3"], "v4": ["-march=x86-64-v4"]}
levels = LEVELS if platform.machine() in ("x86_64", "AMD64") else {"base": []}

setup(
    ext_modules=[
        Extension(
            f"foredraft.models._cpu_{level}",
            [f"src/foredraft/models/csrc/{name}.c" for name in ("kernels", "amx", "layer")],
            depends=["src/foredraft/models/csrc/scratch.h"],
            extra_compile_args=["-std=gnu11", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fopenmp", *flags],
            extra_link_args=["-fopenmp"],
            libraries=["m"],
            optional=True,
        )
        for level, flags in levels.items()
    ]
)
