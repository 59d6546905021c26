"""A small reasoning task, a model made for it and the trainer: long chains whose steps look back at earlier ones."""
