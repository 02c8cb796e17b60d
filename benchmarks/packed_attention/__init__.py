"""Attention of packed documents."""
