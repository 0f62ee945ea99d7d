"""Pictures of live objects: SVG for notebooks, text for terminals, one legend."""
