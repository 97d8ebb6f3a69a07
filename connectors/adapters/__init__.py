"""Our tiers inside other engines."""
