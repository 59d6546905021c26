"""Whether a served model still answers right with eviction: tasks, retrieval, and a model made for one task."""
