"""Text to kernel: render, compile, cache, load, launch.

Knows compilers and drivers and has never heard of attention; it never imports its parent package.
"""
