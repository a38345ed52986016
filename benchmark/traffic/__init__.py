"""The serving benchmark: servers asked as users ask them."""
