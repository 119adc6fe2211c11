# SPDX-License-Identifier: Apache-2.0
"""The wheel's tag: any Python 3, since ctypes needs no ABI of it, on this processor and glibc.

MOEBLAS_PLATFORM is what python/wheel.sh found to be true of the libraries inside.
"""

import os

from setuptools import setup
from setuptools.dist import Distribution

try:
    from setuptools.command.bdist_wheel import bdist_wheel
except ImportError:  # before setuptools 70
    from wheel.bdist_wheel import bdist_wheel


class BinaryDistribution(Distribution):
    """Goes where compiled files belong, although setuptools compiles nothing."""

    def has_ext_modules(self):
        return True


class PlatformWheel(bdist_wheel):
    def get_tag(self):
        return "py3", "none", os.environ["MOEBLAS_PLATFORM"]


setup(distclass=BinaryDistribution, cmdclass={"bdist_wheel": PlatformWheel})
