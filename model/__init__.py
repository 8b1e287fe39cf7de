"""The Transformer that is measured. Knows torch and einops, and nothing else of this project.

`config` and `accounting` import no torch, so that planning and reporting stay light.
"""
