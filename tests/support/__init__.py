"""What tests share: runs to act on, doubles, and the real programs that they start."""
