"""Helpers that several tests share: models that misbehave, fake buckets, hand-made traces."""
