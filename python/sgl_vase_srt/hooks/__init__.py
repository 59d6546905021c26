"""One file a place in SGLang. A hook is a thin function; the first line of its docstring says why it is there."""
