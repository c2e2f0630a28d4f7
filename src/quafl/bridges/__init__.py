"""Our messages inside other people's frameworks: Flower's records, FLARE's data objects."""
