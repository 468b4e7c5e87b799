"""Reference trainers: short, without a framework, meant to be read and copied."""
