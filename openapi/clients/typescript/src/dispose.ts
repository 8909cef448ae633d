// Node 20 may lack Symbol.asyncDispose, which compiled `await using` reads. An existing symbol
// stays unchanged. Import this module before any class that has such a method.
if (Symbol.asyncDispose === undefined) {
  Object.defineProperty(Symbol, "asyncDispose", { value: Symbol.for("Symbol.asyncDispose") });
}

export {};
