// Questions to the server, each an answer or an error with its text.

export class ApiError extends Error {
  constructor(status, text) {
    super(text);
    this.status = status;
  }
}

export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== undefined && value !== null && value !== "") query.set(name, value);
  }
  const text = query.toString();
  let response;
  try {
    response = await fetch(text ? `${path}?${text}` : path, { signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, "The viewer does not answer: was it ended?");
  }
  if (response.ok) return response.json();
  const kind = response.headers.get("Content-Type") ?? "";
  const said = kind.includes("json") ? (await response.json()).error : await response.text();
  throw new ApiError(response.status, said);
}
