"""Types of ops whose results have the shape to which their inputs broadcast."""

from __future__ import annotations

ELEMENTWISE = frozenset(
    "Abs Acos Acosh Add AddV2 Angle ApproximateEqual Asin Asinh Atan Atan2 Atanh BesselI0 BesselI0e BesselI1 BesselI1e "
    "BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 BitwiseAnd BitwiseOr BitwiseXor Bucketize "
    "Ceil CheckNumerics ClipByValue Complex ComplexAbs Conj Cos Cosh Dawsn Digamma Div DivNoNan Elu Equal Erf Erfc Erfinv "
    "Exp Expint Expm1 Floor FloorDiv FloorMod FresnelCos FresnelSin Greater GreaterEqual Identity IdentityN Igamma "
    "IgammaGradA Igammac Imag Inv Invert IsFinite IsInf IsNan LeakyRelu LeftShift Less LessEqual Lgamma Log Log1p LogicalAnd "
    "LogicalNot LogicalOr Maximum Minimum Mod Mul MulNoNan Ndtri Neg NotEqual OnesLike Polygamma Pow Real RealDiv Reciprocal "
    "Relu Relu6 RightShift Rint Round Rsqrt SelectV2 Selu Sigmoid Sign Sin Sinh Softplus Softsign Spence Sqrt Square "
    "SquaredDifference StopGradient Sub Tan Tanh TruncateDiv TruncateMod Xdivy Xlog1py Xlogy ZerosLike Zeta".split()
)
"""Types of ops that compute each element by itself, and broadcast their inputs."""
