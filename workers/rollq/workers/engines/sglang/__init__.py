"""SGLang servers over HTTP."""
