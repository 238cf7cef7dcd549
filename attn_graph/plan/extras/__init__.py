"""What a plan offers beside its call: given results and inputs, verification, explanation."""
