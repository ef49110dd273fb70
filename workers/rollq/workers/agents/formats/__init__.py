"""How families of models write a turn: one parser each, `parse(text, tools, prompt) -> Turn`. Pure.

A parser never raises for what a model wrote, and takes time linear in its length.
"""
