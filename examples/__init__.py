"""Trainers of one's own, run as they are by the tests."""
