"""Whether the page's colours can be told apart, also by people who see fewer."""

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

STYLE = files("solera.report").joinpath("page/style.css").read_text()
BACKGROUND = re.search(r"--card: light-dark\((#\w+), (#\w+)\)", STYLE).groups()
COLOURS = list(zip(*re.findall(r"--c\d: light-dark\((#\w+), (#\w+)\)", STYLE), strict=True))
SIGHT = {
    "normal": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}
"""What is seen of linear RGB (Machado, Oliveira and Fernandes 2009, severity 1)."""


def linear(colour: str) -> np.ndarray:
    encoded = np.array([int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)])
    return np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear sRGB, white D65."""
    xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]) @ np.clip(rgb, 0, 1)
    x, y, z = np.cbrt(xyz / (0.95047, 1, 1.08883))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("theme", [0, 1])
@pytest.mark.parametrize("sight", SIGHT)
def test_any_two_of_the_eight_colours_differ_clearly(theme, sight):
    """ΔE of 2.3 is just noticeable; 10 is seen at a glance."""
    seen = [lab(np.array(SIGHT[sight]) @ linear(colour)) for colour in COLOURS[theme]]
    assert len(seen) == 8
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 10


@pytest.mark.parametrize("theme", [0, 1])
def test_every_colour_stands_out_from_the_background(theme):
    """WCAG asks for a contrast of 3 for graphics."""

    def luminance(colour: str) -> float:
        return float(np.array((0.2126, 0.7152, 0.0722)) @ linear(colour)) + 0.05

    ground = luminance(BACKGROUND[theme])
    for colour in COLOURS[theme]:
        assert max(luminance(colour), ground) / min(luminance(colour), ground) >= 3
