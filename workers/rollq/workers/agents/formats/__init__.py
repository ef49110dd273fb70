"""How model families write turns: one parser per family, `parse(text, tools, prompt) -> Turn`. Pure.

A parser accepts any text, in time linear in the text's length.
"""
