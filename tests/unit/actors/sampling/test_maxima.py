import pytest
import torch
from torch import Tensor

from actors.sampling.maxima import row_maxima

ROWS = (0, 1, 7, 8, 40)
COLUMNS = (128, 1024, 1000)  # whole segments, or not
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def few_values(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    """Returns rows of few distinct values, so that maxima repeat."""
    generator = torch.Generator().manual_seed(rows + columns)
    return torch.randint(-20, 20, (rows, columns), generator=generator).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", COLUMNS)
@pytest.mark.parametrize("rows", ROWS)
def test_the_first_column_of_the_maximum_is_found(rows: int, columns: int, dtype: torch.dtype):
    values = few_values(rows, columns, dtype)
    largest, at = row_maxima(values)
    expected = [row.index(max(row)) for row in values.tolist()]
    assert at.tolist() == expected
    assert largest.tolist() == [row[column] for row, column in zip(values.tolist(), expected, strict=True)]


@pytest.mark.parametrize("rows", [1, 16])
def test_columns_of_a_wider_tensor_are_searched_alone(rows: int):
    whole = few_values(rows, 1024, torch.bfloat16)
    whole[:, 512:] = 100
    largest, at = row_maxima(whole[:, :512])
    assert largest.max() < 100
    assert at.tolist() == [row.index(max(row)) for row in whole[:, :512].tolist()]


@pytest.mark.parametrize("rows", [1, 16])
def test_nan_is_the_largest_and_a_row_may_hold_only_minus_infinity(rows: int):
    values = few_values(rows, 1024, torch.bfloat16)
    values[0, 700] = torch.nan
    values[0, 3] = torch.inf
    values[-1] = torch.nan if rows == 1 else -torch.inf
    largest, at = row_maxima(values)
    assert largest[0].isnan()
    assert at[0] == (0 if rows == 1 else 700)
    assert rows == 1 or (largest[-1] == -torch.inf and at[-1] == 0)
