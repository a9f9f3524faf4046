"""Frameworks that call flashskip: each module imports its own framework, when it is used."""
