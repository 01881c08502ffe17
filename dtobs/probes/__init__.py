"""Probes: the only place of dtobs that touches torch; one file a thing observed.

A probe writes memory and nothing else: no collective, no network, no thread, no synchronisation of a device.
"""
