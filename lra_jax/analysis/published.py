"""Published curves, for comparison with ours.

Relative residual after layers 0 to 12, means over 32 texts of wiki_bio, cut to 128
tokens (Dong, Cordonnier and Loukas 2021, Figure 2); read off the vector figures
``residual_*_vert.pdf`` of twistedcubic/attention-rank-collapse at 38b5df6, to about
0.002. "init" is one random draw of the weights for each curve, so two curves of one
network differ at layer 0 only by that draw.
"""

_VARIANTS = ("attention", "attention + MLP", "attention + skip", "transformer")

# A line for each variant; missing values are 0 to the precision of the figure.
_FIGURE_2 = {
    ("bert", "init"): """
    .612 .018
    .597 .017
    .607 .565 .559 .565 .562 .552 .529 .503 .496 .487 .472 .463 .449
    .597 .563 .535 .565 .537 .529 .493 .464 .439 .414 .406 .364 .345
    """,
    ("bert", "pretrained"): """
    .687 .676 .315 .139 .031 .004
    .687 .433 .209 .040 .002
    .687 .717 .636 .489 .353 .223 .205 .240 .233 .174 .141 .096 .074
    .687 .666 .559 .504 .466 .401 .379 .381 .390 .391 .395 .369 .310
    """,
    ("albert", "init"): """
    .669 .002
    .566 .001
    .642 .642 .613 .546 .493 .449 .412 .379 .348 .321 .296 .275 .256
    .626 .670 .610 .561 .525 .463 .418 .385 .359 .337 .318 .289 .260
    """,
    ("xlnet", "init"): """
    1.000 .002 .000
    1.020 .002
    .998 .995 .989 .990 .982 .978 .973 .959 .947 .944 .938 .930 .927
    .992 .972 .990 .977 .958 .891 .844 .860 .849 .822 .832 .830 .738
    """,
}


def figure_2(network: str, weights: str = "init") -> dict[str, list[float]]:
    """The published curves of a network by variant, 13 numbers each; {} if none.

    Args:
      network: "bert", "albert" or "xlnet".
      weights: "init" or "pretrained".
    """
    lines = _FIGURE_2.get((network, weights), "").strip().splitlines()
    curves = {}
    for variant, line in zip(_VARIANTS, lines, strict=False):
        values = [float(word) for word in line.split()]
        curves[variant] = values + [0.0] * (13 - len(values))
    return curves
