"""Findings: what a run says about each question, as a number with a sentence."""
