"""The calls that each role may make to the server: one mixin of `Buffer` per module."""
