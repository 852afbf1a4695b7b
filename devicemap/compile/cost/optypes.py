"""What is known of ops by their type alone."""

IN_PLACE = frozenset(
    "Abs Acos Acosh Add AddN AddV2 Asin Asinh Atan Atan2 Atanh BesselI0e BesselI1e BiasAdd BiasAddV1 BitwiseAnd "
    "BitwiseOr BitwiseXor Ceil Cholesky ClipByValue Conj Cos Cosh Digamma Div DivNoNan Elu Erf Erfc Erfinv Exp Expm1 "
    "Floor FloorDiv FloorMod FusedBatchNorm FusedBatchNormV2 FusedBatchNormV3 Igamma Igammac Inv Invert LeakyRelu "
    "Lgamma Log Log1p LogSoftmax LogicalAnd LogicalNot LogicalOr MatrixBandPart MatrixInverse MatrixSetDiag "
    "MatrixSetDiagV2 MatrixSetDiagV3 MatrixSolve Maximum Minimum Mod Mul MulNoNan Ndtri Neg NextAfter Polygamma Pow "
    "RealDiv Reciprocal Relu Relu6 Rint Round Rsqrt Select SelectV2 Selu Sigmoid Sign Sin Sinh Softmax Softplus "
    "Softsign Sqrt Square SquaredDifference Sub Tan Tanh TensorScatterAdd TensorScatterMax TensorScatterMin "
    "TensorScatterSub TensorScatterUpdate TruncateDiv TruncateMod Xdivy Xlog1py Xlogy Zeta "
    "EluGrad InvGrad LeakyReluGrad ReciprocalGrad Relu6Grad ReluGrad RsqrtGrad SeluGrad SigmoidGrad SoftplusGrad "
    "SoftsignGrad SqrtGrad TanhGrad".split()
)
"""Ops whose kernels write over an input that nobody else needs."""

HOLDERS = frozenset("TensorListSetItem TensorListPushBack RaggedTensorToVariant".split())
"""Ops that give something that holds the tensors that they take."""

READS = frozenset("ReadVariableOp ResourceGather ResourceGatherNd VarHandleOp Placeholder".split())
"""Stateful ops that do nothing that anybody sees."""

ON_LISTS = frozenset(
    "TensorListReserve EmptyTensorList TensorListFromTensor TensorListSplit TensorListSetItem TensorListPushBack "
    "TensorListPopBack TensorListGetItem TensorListGather TensorListStack TensorListConcat TensorListConcatV2 "
    "RaggedTensorToVariant RaggedTensorFromVariant OptionalNone OptionalFromValue OptionalGetValue".split()
)
"""Ops on lists of tensors, and on tensors that may be there or not."""

CALLS = frozenset("PartitionedCall StatefulPartitionedCall".split())
LOOPS = frozenset("While StatelessWhile".split())
BRANCHES = frozenset("If StatelessIf Case StatelessCase".split())

ASSIGNS = frozenset(
    "AssignAddVariableOp AssignSubVariableOp ResourceApplyGradientDescent ResourceScatterAdd ResourceScatterSub "
    "ResourceScatterUpdate".split()
)
"""Ops that write over what a variable holds, or a copy of it where that is in use."""
