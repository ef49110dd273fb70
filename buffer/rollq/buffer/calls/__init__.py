"""The calls that each role may make of the server: one mixin of `Buffer` a module."""
