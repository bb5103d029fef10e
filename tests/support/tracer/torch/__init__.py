"""What stands in torch's place. An error from a folder of this name is taken for torch's own."""
