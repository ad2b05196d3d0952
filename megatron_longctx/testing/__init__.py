"""What tests of every room share: the multi-process runner, references and tolerances."""
