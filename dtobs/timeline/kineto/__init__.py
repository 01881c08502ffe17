"""Kineto traces of any job, read without torch: where each rank's time goes, and who made the others wait."""
