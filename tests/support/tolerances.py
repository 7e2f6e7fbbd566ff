"""The one table of tolerances: arguments of numpy.testing.assert_allclose or pytest.approx, each with its reason."""

TOLERANCES: dict[str, dict[str, float]] = {
    # A central difference of step 1e-6 in float64: truncation 1e-12, rounding 1e-16 / 1e-6, sums of some hundred.
    "numeric derivative": {"rel": 1e-6, "abs": 1e-7},
    # One kernel beside its formula: sums of up to a hundred terms of 1e-16 (6e-8) each, values up to 10.
    "kernel float64": {"rtol": 1e-12, "atol": 1e-12},
    "kernel float32": {"rtol": 1e-5, "atol": 1e-5},
    # A matrix through five steps of Muon's polynomial, whose slope of 3.4 makes an error of a small singular value
    # larger, up to 3.4**5 = 480 times; numbers up to 1.
    "orthogonalised float64": {"rtol": 0.0, "atol": 1e-12},
    "orthogonalised float32": {"rtol": 0.0, "atol": 1e-5},
    # The same with operands rounded to 8 bits (2**-9), whole matrices: singular values end 0.68 .. 1.14 anyway.
    "orthogonalised bfloat16": {"of norm": 0.06},
    # Ten steps of Muon and AdamW in float64 beside PyTorch's: the required 1e-6 with room.
    "golden losses, float64": {"rtol": 1e-9},
    # Ten float32 AdamW steps beside ten float64 ones; the rules of decay differ by 6e-5 at the end.
    "golden losses": {"rtol": 2e-5},
    # Ten steps from the same start: the losses drift apart by the rounding of operands.
    "bfloat16 losses": {"rtol": 5e-3},
    # float32 sums of exact products of bfloat16 numbers, in units of the sum of their magnitudes: 6e-8 an addition,
    # which grows like the root of their number (2,500 at most).
    "bfloat16 sums": {"rtol": 0.0, "atol": 1e-6},
    # Attention of rounded operands beside its formula, in units of the largest number: p, ds and dy are rounded too,
    # 2**-9 relative each.
    "bfloat16 attention": {"rtol": 0.0, "atol": 6e-3},
    # Attention's gradient where scores are some hundreds, in units of the error of the textbook's formula in float32
    # (a stored softmax), which rounds the scores as ours does: only the order of the sums differs.
    "attention, saturated": {"factor": 2.0},
    # The golden model beside its file of float32 numbers from a float64 program, in units of each tensor's largest
    # number. float32 sums of a few thousand products in another order differ by a few 1e-6. Operands rounded to 8 bits
    # differ by up to 2**-9 each; through three blocks that adds up to a few per cent at worst.
    "golden state, float64": {"of largest": 1e-6},
    "golden state, float32": {"of largest": 1e-4},
    "golden state, bfloat16": {"of largest": 3e-2},
    # A whole model beside an independent program in float64, in units of each tensor's largest number. In about
    # 50 random models each the worst float64 gradient was off by 9e-15, the worst float32 one by 3e-6.
    "whole model, float64": {"of largest": 1e-12},
    "whole model, float32": {"of largest": 1e-4},
    # Operands of every product rounded to 8 bits, through three blocks: in 1,500 random models of 6, 8 and 12 channels
    # 6 per cent at worst.
    "whole model, bfloat16": {"of largest": 1e-1},
    # Logits of some units in float32 from another program (PyTorch), whose sums have another order: twelve blocks of
    # sums over hundreds of products of relative error 6e-8 each. The bound that users are promised.
    "another program's logits": {"rtol": 0.0, "atol": 1e-4},
    # Losses of fifty steps of tuning beside PyTorch's: what gradients near zero make of AdamW's first steps differs.
    "fifty steps": {"rtol": 0.0, "atol": 1e-3},
    # Accuracies and bits a byte of lm-evaluation-harness, by PyTorch. The bound that users are promised.
    "another program's evaluation": {"rel": 0.0, "abs": 1e-4},
    # The same in another order, of random weights through two blocks, in units of the largest score.
    "kept, float32": {"rtol": 0.0, "atol": 1e-5},
    # Weights, keys and values rounded to 8 bits: some tenths of a per cent were found.
    "kept, bfloat16": {"rtol": 0.0, "atol": 5e-2},
    # Most bytes at once of a micro-batch among others beside one alone: Dask orders tasks otherwise where more follow,
    # and the logits of another chunk exist at the same time (3 to 4 % if they are a tenth of all).
    "memory of a micro-batch": {"factor": 1.05},
}
