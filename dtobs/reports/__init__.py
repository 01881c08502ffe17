"""Renders a diagnosis as text, JSON or HTML. No analysis happens here."""
