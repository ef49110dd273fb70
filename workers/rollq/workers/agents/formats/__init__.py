"""How families of models write a turn: one parser per family, `parse(text, tools, prompt) -> Turn`. Pure.

A parser accepts any text and takes time linear in its length.
"""
