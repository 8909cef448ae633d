// Node 20 may have no Symbol.asyncDispose, and what compilers make of `await using` reads it from there. One that exists is
// left alone. To be evaluated before any class that has such a method.
if (Symbol.asyncDispose === undefined) {
  Object.defineProperty(Symbol, "asyncDispose", { value: Symbol.for("Symbol.asyncDispose") });
}

export {};
