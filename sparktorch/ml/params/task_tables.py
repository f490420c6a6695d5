"""The Params of the estimators for one kind of task, in one table per subject; as in `tables`."""

from __future__ import annotations

from sparktorch.ml.params.declare import ParamSpec as P

# fmt: off
HELD_OUT = (
    P("validationFraction", "float", 0.1,
      "the share of rows that validate and do not train, 50,000 rows at most, where epochs is 'auto' or this is set, "
      "and validationIndicatorCol is not; a hash of the row chooses them, a ranker holds out whole groups, and a "
      "forecaster the last windows of series; 0 holds out none (>= 0, < 1)", compared="unless default"),
)

PRETRAINED = (
    P("modelFolder", "str", None,
      "a local folder with a model of Hugging Face's and its tokenizer or image processor, at the same path on each "
      "machine; an image classifier without one trains a small new network", compared=True),
    P("numLabels", "int", None,
      "the number of classes; by default that of the folder's configuration or, if it is larger, of the labels (> 1)",
      compared=True),
)

TEXT = (
    P("textCol", "str", "text", "the column of text", compared=False),
    P("maxLength", "int", 128,
      "the number of tokens after which a row is cut off (> 0); for a model that takes fewer, the default is that "
      "number, and a larger value is refused", compared=True),
)

IMAGE = (
    P("imageCol", "str", "image", "the binary column of image files, such as JPEG and PNG", compared=False),
)

TABLE = (
    P("categoricalCols", "list[str]", None,
      "the columns of categories; dates and timestamps among them become categories of their parts, such as the "
      "month; by default the columns of strings, booleans, dates and timestamps", compared=True),
    P("numericCols", "list[str]", None,
      "the columns of numbers; by default those of numbers that categoricalCols does not name", compared=True),
    P("minCount", "int", 2, "the fewest training rows of a category; a rarer one counts as unknown", compared=True),
    P("maxCategories", "int", 10_000,
      "the most categories of a column, its most frequent ones; the others count as unknown", compared=True),
    P("maxIntegerCategories", "int", 4000,
      "the most distinct values of a column of integers that is taken as categories, too, if neither categoricalCols "
      "nor numericCols is set, and the values have two rows each on average; its categories are the values that "
      "minCount training rows have, or all integers of a range of at most 32; 0 takes no such column",
      compared="unless default"),
)

PAIR = (
    P("userCol", "str", "user", "the column of users: strings or whole numbers", compared=False),
    P("itemCol", "str", "item", "the column of items: strings or whole numbers", compared=False),
    P("userFeatures", "list[str]", [], "columns of numbers that describe the user of a row", compared=False),
    P("itemFeatures", "list[str]", [], "columns of numbers that describe the item of a row", compared=False),
)

RATING = (
    P("ratingCol", "str", "rating",
      "the column of ratings; with implicitPrefs, of how often the item was chosen (>= 0), where an empty name means "
      "once", compared=False),
)

FACTORS = (
    P("rank", "int", 32, "the number of elements of a user's and of an item's vector (> 0)", compared=True),
    P("regParam", "float", 0.1,
      "the factor of the sum of squares of both vectors of a row, which is added to the loss of the row; with "
      "ratings, both are in units of their standard deviation (>= 0)", compared=True),
    P("implicitPrefs", "bool", False,
      "whether rows are what users chose, and not what they thought of it: items are ranked, not rated", compared=True),
    P("alpha", "float", 1.0,
      "with implicitPrefs, what a unit of log(1 + rating) adds to the weight 1 of a row; a row whose rating is 0 does "
      "not count (>= 0)", compared="unless default"),
    P("numNegatives", "int", None,
      "with implicitPrefs, the number of other items with which that of a row is compared, drawn anew in each epoch "
      "(> 0); by default all items, or 64 where there are more than 20,000", compared=True),
)

COLD_START = (
    P("coldStartStrategy", "str", "nan",
      "what transform does with pairs whose user or item the fit did not have: 'nan' predicts NaN, 'drop' leaves them "
      "out", compared=False),
)

SERIES = (
    P("context", "int", None,
      "the rows of a series from which a forecast is made (> 1); by default two horizons, or three seasons if these "
      "are more, as far as half of a series goes", compared=True),
    P("horizon", "int", None, "rows of a forecast (> 0)", compared=True),
    P("pastCols", "list[str]", [], "columns of numbers that are known up to the last row of the context",
      compared=True),
    P("futureCols", "list[str]", [], "columns of numbers that are known ahead, such as prices and the calendar",
      compared=True),
    P("staticCols", "list[str]", [], "columns of numbers, strings and booleans that do not change within a series",
      compared=True),
    P("quantiles", "list[float]", [],
      "quantiles to forecast, ascending, such as [0.1, 0.5, 0.9], in place of one value (> 0, < 1)", compared=True),
)

WINDOWS = (
    P("step", "int", 1, "the rows from the beginning of one training window to that of the next (> 0)", compared=True),
    P("scaling", "str", "window",
      "'window' gives the module the target of each window less the mean of its context, in units of its standard "
      "deviation; 'none' gives it the target as it is", compared=True),
    P("season", "int", None,
      "the rows of a season, whose profile the default network continues; by default fit finds it in some of the "
      "series; 1 says that there is none", compared="unless default"),
)
